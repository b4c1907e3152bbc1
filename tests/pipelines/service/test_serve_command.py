"""`edje-index serve`: addresses, keys, signals, limits, and clients that are slow,
large or many.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from edje_index import Client
from pipelines.service import routes, server
from pipelines.service.guard import Guard, Limits, Metrics
from pipelines.service.server import listen
from pipelines.service.state import Threads
from tests.pipelines.service.server import (
    resident_bytes,
    serve,
    serve_with,
)

KEY = "a-key-of-enough-letters"


def connect(service):
    return socket.create_connection(("127.0.0.1", service.port), timeout=60)


def test_responses_do_not_wait_for_acknowledgements():
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as end,
    ):
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_need_a_key():
    answer = PlainTextResponse("ok")
    client = TestClient(
        Guard(answer, Limits(), ["another-key-of-letters", KEY], Metrics())
    )
    for headers in (
        {},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": "Bearer"},
    ):
        refused = client.get("/info", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            401,
            "unauthorized",
        )
    assert client.get("/info", headers={"Authorization": f"bearer {KEY}"}).text == "ok"
    assert {
        client.get(f"/{path}").status_code
        for path in ("thumbnails/0", "metrics", "openapi.json")
    } == {401}
    assert {client.get(path).status_code for path in ("/healthz", "/app.js", "/")} == {
        200
    }


def test_a_request_ends_at_its_deadline():
    async def never(scope, receive, send):
        await asyncio.Event().wait()

    client = TestClient(Guard(never, Limits(deadline_seconds=0.01), [], Metrics()))
    answer = client.get("/info")
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        504,
        "deadline_exceeded",
    )


def test_a_cancelled_caller_does_not_free_its_thread(monkeypatch):
    begun = []
    may_end = threading.Event()

    def work():
        begun.append(None)
        may_end.wait(60)

    async def test():
        threads = Threads(2, "test")
        refuse = Mock(side_effect=RuntimeError("can't start new thread"))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with pytest.raises(RuntimeError):
                    await threads.run(time.monotonic)
        for _ in range(6):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(threads.run(work), 0.05)
        assert len(begun) == 2
        may_end.set()
        await threads.run(work)
        # The callers that did not get a thread have left nothing behind.
        assert len(begun) == 3

    asyncio.run(test())


@pytest.mark.parametrize(
    ("route", "reads"),
    [
        (partial(routes.thumbnail, side=64), "thumbnail_of"),
        (routes.photo, "read_photo"),
    ],
)
def test_a_cancelled_request_does_not_free_its_thread(monkeypatch, route, reads):
    begun = []
    may_end = threading.Event()

    def read(*_):
        begun.append(None)
        may_end.wait(60)

    async def row_of(*_):
        return object(), {}

    monkeypatch.setattr(routes, reads, read)
    monkeypatch.setattr(routes, "_photo_row", row_of)

    async def test() -> None:
        state = SimpleNamespace(files=Threads(1, "test"))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(route(state, None, row_id=3), 0.05)
        may_end.set()

    asyncio.run(test())
    assert len(begun) == 1


def test_invalid_keys_are_refused_and_not_shown(index, run, monkeypatch):
    for text in ("", ",", "short", "too short words", "ü" * 20):
        monkeypatch.setenv("EDJE_API_KEYS", text)
        err = run.refused("serve", index, "--port", "0")
        assert "EDJE_API_KEYS must hold API keys" in err
        assert len(text) < 2 or text not in err


def test_wrong_use_is_refused(index, tmp_path, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = run("serve", index, "--port", taken.getsockname()[1])
    assert (code, "Address already in use" in err) == (2, True)
    assert "no index at" in run("serve", tmp_path / "none", "--port", "0")[2]
    for option in (["--host", "0.0.0.0"], ["--port", 8000], ["--insecure"]):
        err = run.refused("serve", index, "--mcp", *option)
        assert f"{option[0]}: no effect with --mcp" in err
    for host in ("0.0.0.0", "::", "photos.example.org"):
        err = run.refused("serve", index, "--host", host, "--port", "0")
        assert "set EDJE_API_KEYS, or give --insecure" in err
    for name in ("photos.*", "a.example:80", "https://a.example", "a b", ""):
        err = run.refused("serve", index, "--port", "0", "--allowed-host", name)
        assert "is no host name" in err
    err = run.refused("serve", index, "--insecure", "--host", "a..b", "--port", "0")
    assert "cannot listen on a..b:0" in err
    assert "has no folder beside it" in run.refused("show", "/")


@pytest.mark.slow
def test_other_machines_are_served_if_asked(index, tmp_path):
    options = ["--host", "0.0.0.0", "--insecure", "--allowed-host", "Photos.example"]
    with serve(tmp_path, index, *options) as service:
        statuses = [
            httpx.get(
                f"http://127.0.0.1:{service.port}/info", headers={"Host": host}
            ).status_code
            for host in ("photos.example", "localhost", "any.example")
        ]
        assert statuses == [200, 200, 400]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_finish_after_a_signal(index, tmp_path, number):
    """Eight requests whose bodies arrive after the signal are answered before the
    service exits.
    """
    bodies = [
        json.dumps({"query": f"{query} dogs", "documents": [0, 1, 2, 3] * 25}).encode()
        for query in range(8)
    ]
    with (
        serve(tmp_path, index, EDJE_API_KEYS=KEY) as service,
        contextlib.ExitStack() as connections,
    ):
        with Client(service.url, KEY) as client:
            assert len(client.search("a dog", 2)) == 2
        clients = [connections.enter_context(connect(service)) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            begin_request(
                client, "/v2/rerank", len(body), f"Authorization: Bearer {KEY}"
            )
        service.process.send_signal(number)
        wait_until_refused(service)
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(body)
        for client in clients:
            answer = HTTPResponse(client)
            answer.begin()
            assert (answer.status, len(json.load(answer)["results"])) == (200, 100)
        assert service.process.wait(60) == 0
    assert re.fullmatch(r"loading \S*photos\.edje\n", service.log.read_text())


def begin_request(client, path, body_bytes, *headers):
    """Send the headers of a request, and wait until the service has begun the
    request and asks for the body.
    """
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


def wait_until_refused(service):
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
def test_large_bodies_are_refused_without_taking_memory(index, tmp_path):
    with serve(tmp_path, index) as service, ThreadPoolExecutor(40) as pool:
        httpx.post(f"{service.url}/search", json={"query": "a"})
        before = resident_bytes(service.process.pid)
        with connect(service) as client:
            client.sendall(
                b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
                b" application/json\r\nContent-Length: 200000000\r\n\r\n"
            )
            assert client.recv(64).startswith(b"HTTP/1.1 413 ")
        json_body = {"content-type": "application/json"}
        body = (b"x" * (1 << 20) for _ in range(200))
        # the service hangs up while the client still sends
        with contextlib.suppress(httpx.TransportError):
            assert (
                httpx.post(
                    f"{service.url}/search", content=body, headers=json_body
                ).status_code
                == 413
            )
        assert resident_bytes(service.process.pid) - before < 48 << 20
        clients = [connect(service) for _ in range(40)]

        def send_most(client):
            with contextlib.suppress(OSError):
                begin_request(client, "/search", 12_000_000)
                client.sendall(b"x" * 11_000_000)

        # 440 MB in all
        list(pool.map(send_most, clients))
        assert resident_bytes(service.process.pid) - before < 200 << 20
        for client in clients:
            client.close()
        assert httpx.get(f"{service.url}/healthz").status_code == 200


@pytest.mark.slow
def test_slow_clients_are_hung_up_on(index, tmp_path):
    with serve_with(tmp_path, index, deadline_seconds=2, connections=50) as service:
        kept = HTTPConnection("127.0.0.1", service.port)
        kept.request("GET", "/healthz")
        assert kept.getresponse().read() == b'{"status":"ok"}'
        silent = [connect(service) for _ in range(40)]
        for client in silent[:20]:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        with connect(service) as body:
            body.sendall(
                b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
                b" application/json\r\n"
            )
            body.sendall(b"Content-Length: 50\r\n\r\n{")
            assert body.recv(64).startswith(b"HTTP/1.1 408 ")
        more = [connect(service) for _ in range(10)]
        # all connections are taken
        assert httpx.get(f"{service.url}/healthz").status_code == 503
        for client in [*silent, *more]:
            assert client.recv(64) == b""
            client.close()
        assert httpx.get(f"{service.url}/healthz").status_code == 200
        kept.request("GET", "/healthz")
        # a connection that waits for its next request is kept
        assert kept.getresponse().status == 200
        kept.close()


def black(side):
    out = io.BytesIO()
    Image.new("L", (side, side)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.slow
def test_image_requests_leave_memory_and_searches_alone(index, tmp_path):
    """Eight requests at the limit of pixels, eight far above, and eight whose
    clients leave.
    """
    with serve(tmp_path, index) as service, ThreadPoolExecutor(8) as pool:
        post = partial(httpx.post, f"{service.url}/search")
        post(json={"query": "a"})
        process = Path(f"/proc/{service.process.pid}")
        before = resident_bytes(service.process.pid)
        # reset the peak
        (process / "clear_refs").write_text("5")

        def send(side, timeout):
            body = {"inputs": [{"image": black(side)}] * 16}
            with contextlib.suppress(httpx.ReadTimeout):
                return httpx.post(
                    f"{service.url}/embed", json=body, timeout=timeout
                ).status_code
            return 0

        for side, timeout, allowed in (
            (2500, 120, {200, 504}),
            (6300, 120, {413}),
            (2500, 1, {0, 200}),
        ):
            sent = [pool.submit(send, side, timeout) for _ in range(8)]
            seconds = []
            while not all(answer.done() for answer in sent):
                started = time.monotonic()
                query = {"query": f"{len(seconds)} dogs"}
                assert post(json=query).status_code == 200
                seconds.append(time.monotonic() - started)
            assert {answer.result() for answer in sent} <= allowed
            assert np.quantile(seconds, 0.95) < 2
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
        assert int(peak) * 1024 - before < 500 << 20
        used = service.cpu_seconds()
        time.sleep(3)
        # requests whose clients have left are not computed
        assert service.cpu_seconds() - used < 2


@pytest.mark.slow
def test_clients_that_leave_do_no_harm(index, tmp_path):
    with serve(tmp_path, index) as service:
        body = b'{"query": "a dog", "texts": [' + b",".join([b'"1"'] * 500) + b"]}"
        head = (
            "POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Length:"
            f" {len(body)}\r\n"
        )
        for _ in range(20):
            with connect(service) as client:
                client.sendall(
                    head.encode() + b"Content-Type: application/json\r\n\r\n" + body
                )
        garbage = [
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            b"A" * 200_000,
            b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000,
            b"POST /search HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        ]
        for data in garbage:
            with connect(service) as client, contextlib.suppress(OSError):
                client.sendall(data)
                client.recv(1024)
        assert (
            httpx.post(
                f"{service.url}/search", json={"query": "a dog"}, timeout=60
            ).status_code
            == 200
        )


_THREADS_AFTER_LOADING = """
import os, sys, time
from pathlib import Path
import torch
from pipelines.service.server import open_warm

def threads():
    # a thread takes some time to end
    counts = [0]
    while len(counts) < 6 or len({*counts[-5:]}) > 1:
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.1)
    return counts[-1]

open_warm(Path(sys.argv[1]))
before = threads()
torch.ones(1 << 22).exp()
print(threads() - before)
"""


def test_loading_leaves_no_threads_beside_those_of_the_model(index):
    done = subprocess.run(
        [sys.executable, "-c", _THREADS_AFTER_LOADING, index],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    # the main thread had not computed before
    assert done.stdout.split() == ["1"]


def test_the_model_is_loaded_although_no_further_thread_can_start(index, monkeypatch):
    refused = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(server, "Thread", Mock(return_value=Mock(start=refused)))
    assert server.open_warm(index).manifest.counts.indexed
    assert refused.called
