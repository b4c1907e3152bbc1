"""`edje-index serve`: addresses, keys, signals, limits, and clients that are slow, large or many."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
from PIL import Image

from edje_index import Client, ServiceError
from pipelines.service.settings import hosts_to_answer, is_loopback, read_api_keys
from storage_formats.errors import UsageError
from tests.pipelines.service.server import resident_bytes, serve, serve_with

KEY = "a-key-of-enough-letters"


def connect(service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=30)


def test_requests_need_a_key_and_finish_after_a_signal(index, tmp_path):
    (tmp_path / "keys").write_text(f"# keys\n{KEY}\nanother-key-of-letters\n")
    with serve(tmp_path, index, "--api-keys", tmp_path / "keys") as service:
        for headers in ({}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": "Bearer"}):
            answer = httpx.get(f"{service.url}/info", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert httpx.post(f"{service.url}/search", json={"query": "a"}).status_code == 401
        assert httpx.get(f"{service.url}/thumbnails/0").status_code == 401
        assert httpx.get(f"{service.url}/metrics").status_code == 401
        assert httpx.get(f"{service.url}/healthz").json() == {"status": "ok"}
        with Client(service.url, KEY) as client:
            assert len(client.search("a dog", 2)) == 2
        check_that_requests_finish(service, signal.SIGTERM, f"Authorization: Bearer {KEY}")
    assert KEY not in service.log.read_text()


@pytest.mark.slow
def test_keys_come_from_the_environment(index, tmp_path):
    with serve(tmp_path, index, EDJE_API_KEYS=KEY) as service:
        assert httpx.get(f"{service.url}/info").status_code == 401
        assert httpx.get(f"{service.url}/info", headers={"Authorization": f"bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize("text", ["", "# only a comment", "short", "with a space in the middle of it", "ü" * 20])
def test_invalid_keys_are_refused_and_not_shown(text):
    with pytest.raises(UsageError, match=r"keys\.txt contains") as caught:
        read_api_keys(text, "keys.txt")
    assert not text or text not in str(caught.value)


def test_addresses():
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("photos.example.org")
    assert "localhost" in hosts_to_answer("127.0.0.1", [])
    assert hosts_to_answer("0.0.0.0", []) == ()
    assert "photos.example.org" in hosts_to_answer("0.0.0.0", ["Photos.example.org"])


def test_wrong_use_is_refused(index, tmp_path, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = run("serve", index, "--port", taken.getsockname()[1])
    assert (code, "Address already in use" in err) == (2, True)
    assert "no index at" in run("serve", tmp_path / "none", "--port", "0")[2]
    assert "two indexes have the name 'photos'" in run("serve", index, index, "--port", "0")[2]
    assert "cannot read API keys" in run("serve", index, "--api-keys", tmp_path / "none")[2]


@pytest.mark.slow
def test_ctrl_c_lets_requests_finish(index, tmp_path):
    with serve(tmp_path, index) as service:
        check_that_requests_finish(service, signal.SIGINT)


def check_that_requests_finish(service, number: int, *headers: str) -> None:
    """Send a signal while eight requests are in progress. They must be answered before the service exits."""
    bodies = [json.dumps({"query": f"{query} dogs", "documents": [0, 1, 2, 3] * 250}).encode() for query in range(8)]
    with contextlib.ExitStack() as connections:
        clients = [connections.enter_context(connect(service)) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            begin_request(client, "/v2/rerank", len(body), *headers)
        service.process.send_signal(number)
        wait_until_refused(service)
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(body)
        for client in clients:
            answer = HTTPResponse(client)
            answer.begin()
            assert (answer.status, len(json.load(answer)["results"])) == (200, 1000)
    assert service.process.wait(60) == 0
    assert re.fullmatch(r"loading \S*photos\.edje\n", service.log.read_text())


def begin_request(client: socket.socket, path: str, body_bytes: int, *headers: str) -> None:
    """Send the headers of a request, and wait until the service has begun the request and asks for the body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {body_bytes}",
        "Expect: 100-continue",
        *headers,
    ]
    client.sendall("\r\n".join([*lines, "", ""]).encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += client.recv(1) or pytest.fail(f"the service hung up after {answer!r}")
    assert answer.startswith(b"HTTP/1.1 100 ")


def wait_until_refused(service) -> None:
    """Wait until the service accepts no more connections."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            connect(service).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.01)
    pytest.fail("the service still accepts connections")


@pytest.mark.slow
def test_large_bodies_are_refused_before_they_are_read(index, tmp_path):
    with serve(tmp_path, index) as service:
        httpx.post(f"{service.url}/search", json={"query": "a"})
        before = resident_bytes(service.process.pid)
        with connect(service) as client:
            client.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 413 ")
        body = (b"x" * (1 << 20) for _ in range(64))
        with contextlib.suppress(httpx.TransportError):  # the service hangs up while the client still sends
            assert httpx.post(f"{service.url}/search", content=body).status_code == 413
        assert resident_bytes(service.process.pid) - before < 48 << 20
        assert httpx.get(f"{service.url}/healthz").status_code == 200


@pytest.mark.slow
def test_slow_clients_are_hung_up_on(index, tmp_path):
    with serve_with(tmp_path, index, body_seconds=0.5) as service:
        started = time.monotonic()
        with (
            connect(service) as silent,
            connect(service) as header,
            connect(service) as body,
            connect(service) as again,
        ):
            header.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
            body.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            again.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += again.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
            again.sendall(b"GET /healthz HT")
            assert silent.recv(64) == b""
            assert header.recv(64) == b""
            assert body.recv(64).startswith(b"HTTP/1.1 408 ")
            with contextlib.suppress(ConnectionResetError):
                assert again.recv(64) == b""
        assert time.monotonic() - started < 10
        assert httpx.get(f"{service.url}/healthz").status_code == 200


@pytest.mark.slow
def test_too_many_requests_are_refused_with_the_time_to_wait(index, tmp_path):
    with (
        serve_with(tmp_path, index, waiting=1) as service,
        Client(service.url) as client,
        ThreadPoolExecutor(16) as pool,
    ):

        def outcome(number: int) -> int | ServiceError:
            try:
                return len(client.rerank(f"{number} dogs", [0, 1, 2, 3] * 250))
            except ServiceError as error:
                return error

        outcomes = list(pool.map(outcome, range(16)))
        refused = [error for error in outcomes if isinstance(error, ServiceError)]
        assert refused, "all were answered"
        assert {error.status for error in refused} == {429}
        assert all(error.retry_after is not None and error.retry_after >= 1 for error in refused)
        assert [value for value in outcomes if value == 1000], "none was answered"
        assert client.search("a dog", 1)


@pytest.mark.slow
def test_a_request_ends_at_its_deadline(index, tmp_path):
    with serve_with(tmp_path, index, deadline_seconds=0.001) as service:
        answer = httpx.post(f"{service.url}/rerank", json={"query": "a", "texts": ["0", "1"] * 400})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.slow
def test_an_image_with_too_many_pixels_is_refused(index, tmp_path):
    out = io.BytesIO()
    Image.new("1", (9000, 9000)).save(out, "PNG")  # 10 kB
    with serve(tmp_path, index) as service:
        httpx.post(f"{service.url}/search", json={"query": "a"})
        before = resident_bytes(service.process.pid)
        body = {"image": base64.b64encode(out.getvalue()).decode()}
        answer = httpx.post(f"{service.url}/search", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert resident_bytes(service.process.pid) - before < 64 << 20


@pytest.mark.slow
def test_clients_that_leave_do_no_harm(index, tmp_path):
    with serve(tmp_path, index) as service:
        for _ in range(20):
            with connect(service) as client:
                body = b'{"query": "a dog", "texts": [' + b",".join([b'"1"'] * 500) + b"]}"
                head = f"POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        garbage = [
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            b"A" * 200_000,
            b"POST /search HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        ]
        for data in garbage:
            with connect(service) as client:
                try:
                    client.sendall(data)
                    client.recv(1024)
                except OSError:
                    pass
        assert httpx.post(f"{service.url}/search", json={"query": "a dog"}, timeout=60).status_code == 200


@pytest.mark.slow
def test_many_thumbnails_at_once_take_few_threads(index, tmp_path):
    with serve(tmp_path, index) as service, ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda row: httpx.get(f"{service.url}/thumbnails/{row % 4}").status_code, range(200))
        assert set(answers) == {200}
        assert len(list(Path(f"/proc/{service.process.pid}/task").iterdir())) < 60
