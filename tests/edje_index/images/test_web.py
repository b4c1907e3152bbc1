"""Files on web servers: whole, as ranges, and with servers that fail."""

import base64
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from edje_index.images.decode import ImageError
from edje_index.images.transient import TransientInputError
from edje_index.inputs.containers import Container
from edje_index.inputs.refs import InputRef, read_bytes
from storage_formats.errors import EdjeError
from storage_formats.remote import files as remote
from storage_formats.remote.files import (
    ChangedFileError,
    UnreachableError,
    read_remote,
    read_remote_range,
    remote_version,
)
from tests.web_server import Handler, serving, web_server

DATA = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch):
    """An empty server; pauses between attempts are short."""
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("edje_index.images.transient.PAUSES", (0.0,))
    with web_server() as running:
        yield running


def ref(server, path, **fields):
    return InputRef(server.url + path, (server.url + path).encode(), **fields)


def test_ranges(server):
    server.files["/a.bin"] = DATA
    version = remote_version(f"{server.url}/a.bin")
    assert version.length == len(DATA)
    assert read_remote_range(f"{server.url}/a.bin", 1000, 77, version) == DATA[77:1077]
    with pytest.raises(ChangedFileError):
        read_remote_range(f"{server.url}/a.bin", 5, len(DATA), version)
    server.ranges = False
    with pytest.raises(OSError, match="download the file"):
        remote_version(f"{server.url}/a.bin")
    with pytest.raises(OSError, match="download the file"):
        read_remote_range(f"{server.url}/a.bin", 5, 1, version)


def test_servers_of_a_host_that_send_different_etags_have_one_file(server):
    day = "Tue, 24 Nov 2026 10:00:00 GMT"

    def respond(etag, modified):
        headers = {
            "Content-Range": "bytes 0-0/9",
            "ETag": etag,
            "Last-Modified": modified,
        }
        server.responses["/a.tar"] = lambda request: (206, headers, b"x")

    respond('"one"', day)
    version = remote_version(f"{server.url}/a.tar")
    respond('"two"', day)
    assert read_remote_range(f"{server.url}/a.tar", 1, 0, version) == b"x"
    respond('"two"', day.replace("10:00", "10:01"))
    with pytest.raises(ChangedFileError):
        read_remote_range(f"{server.url}/a.tar", 1, 0, version)


@pytest.mark.parametrize(
    "fault", ["reset", "truncate", "429", "500", "502", "503", "504", "408"]
)
def test_passing_trouble_is_overcome(server, fault):
    server.files["/a.jpg"] = DATA
    server.faults["/a.jpg"] = [fault, fault, fault]
    assert read_bytes(ref(server, "/a.jpg")) == DATA
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "reason"),
    [("404", "missing"), ("410", "missing"), ("403", "unreadable")],
)
def test_refusals_are_not_repeated(server, status, reason):
    server.files["/a.jpg"] = DATA
    server.faults["/a.jpg"] = [status]
    with pytest.raises(ImageError, match=f"{reason}: HTTP status {status}"):
        read_bytes(ref(server, "/a.jpg"))
    assert len(server.requests) == 1


def test_lasting_trouble_of_an_archive_is_temporary(server):
    server.files["/a.tar"] = DATA
    server.faults["/a.tar"] = ["503"] * 100
    for kind in ("tar", "zip"):
        with pytest.raises(TransientInputError, match=r"cannot read .*/a\.tar.*503"):
            read_bytes(ref(server, "/a.tar", container=Container(kind, len(DATA))))


def test_large_files_are_refused_before_they_are_read(server):
    server.responses["/declared.jpg"] = lambda headers: (
        200,
        {"Content-Length": "999999999999"},
        b"x",
    )
    chunks = (b"400\r\n" + bytes(1024) + b"\r\n") * 100 + b"0\r\n\r\n"
    server.responses["/endless.jpg"] = lambda headers: (
        200,
        {"Transfer-Encoding": "chunked", "Content-Length": ""},
        chunks,
    )
    for path in ("/declared.jpg", "/endless.jpg"):
        with pytest.raises(OSError, match="over the limit of 10000"):
            read_remote(server.url + path, 10_000)
    assert read_remote(f"{server.url}/endless.jpg", 1 << 20) == bytes(102_400)
    with pytest.raises(ImageError, match="too-many-bytes"):
        read_bytes(ref(server, "/declared.jpg"))


def test_redirects(server):
    def redirect(path, location):
        server.responses[path] = lambda headers: (302, {"Location": location}, b"")
        return f"{server.url}{path}"

    server.files["/b.jpg"] = DATA
    assert read_remote(redirect("/a.jpg", "/b.jpg"), 1 << 20) == DATA
    with pytest.raises(UnreachableError, match="redirects"):
        read_remote(redirect("/loop.jpg", "/loop.jpg"), 1 << 20)
    with pytest.raises(OSError, match="not a valid URL"):
        read_remote(redirect("/local.jpg", "file:///etc/hostname"), 1 << 20)


def test_a_server_that_stalls(server, monkeypatch):
    remote._pool.cache_clear()
    monkeypatch.setattr(remote, "READ_SECONDS", 0.1)
    server.files["/a.jpg"] = DATA
    server.faults["/a.jpg"] = ["slow"] * 20
    with pytest.raises(ImageError, match=r"unreachable: .*[Tt]imed out"):
        read_bytes(ref(server, "/a.jpg"))
    remote._pool.cache_clear()


class Dripping(Handler):
    """Sends one byte every 50 ms, for 5 seconds."""

    def do_GET(self):
        self.respond(200, [("Content-Length", "100")], b"")
        for _ in range(100):
            self.wfile.write(b"x")
            time.sleep(0.05)


def test_a_server_that_sends_a_byte_now_and_then_is_stopped(monkeypatch):
    monkeypatch.setattr(remote, "MAX_SECONDS", 0.3)
    started = time.monotonic()
    with (
        serving(Dripping) as url,
        pytest.raises(UnreachableError, match="did not arrive within"),
    ):
        read_remote(f"{url}/a.jpg", 1 << 20)
    assert time.monotonic() - started < 3


def test_the_pause_that_a_server_asks_for_is_made(server, monkeypatch):
    monkeypatch.setattr(remote, "_LONGEST_PAUSE", 10)
    started = time.monotonic()

    def answer(headers):
        if time.monotonic() - started < 1:
            return 429, {"Retry-After": "1"}, b""
        return 200, {}, DATA

    server.responses["/a.jpg"] = answer
    assert read_remote(f"{server.url}/a.jpg", 1 << 20) == DATA
    assert len(server.requests) == 2


def test_another_range_than_was_requested_is_refused(server):
    headers = {"Content-Range": "bytes 0-1/9"}
    server.responses["/a.tar"] = lambda request: (206, headers, b"xy")
    version = remote.FileVersion(9)
    for total in ("9", "*"):
        headers["Content-Range"] = f"bytes 0-1/{total}"
        assert read_remote_range(f"{server.url}/a.tar", 2, 0, version) == b"xy"
        with pytest.raises(OSError, match="the bytes from 0 on in place of those from"):
            read_remote_range(f"{server.url}/a.tar", 2, 4, version)


@pytest.mark.parametrize(
    ("before", "credentials"),
    [("http://user:word@", b"user:word"), ("us%40er:p%3Aw@", b"us@er:p:w")],
)
def test_requests_go_through_the_proxy_of_the_environment(
    server, monkeypatch, before, credentials
):
    seen = []

    def answer(headers):
        seen.append(headers["proxy-authorization"])
        return 200, {}, DATA

    server.responses["http://photos.invalid/a.jpg"] = answer
    server.files["/b.jpg"] = b"direct"
    monkeypatch.setenv("http_proxy", server.url.replace("http://", before))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read_remote("http://photos.invalid/a.jpg", 1 << 20) == DATA
    assert seen == [f"Basic {base64.b64encode(credentials).decode()}"]
    assert read_remote(f"{server.url}/b.jpg", 1 << 20) == b"direct"
    monkeypatch.setenv("http_proxy", "socks5://user:word@127.0.0.1:1")
    with pytest.raises(EdjeError, match="is no web proxy"):
        read_remote("http://photos.invalid/c.jpg", 1 << 20)


def test_connections_per_host_are_limited(server):
    for number in range(40):
        server.files[f"/{number}.jpg"] = DATA
        server.faults[f"/{number}.jpg"] = ["slow"]
    with ThreadPoolExecutor(40) as pool:
        results = list(
            pool.map(
                lambda number: read_bytes(ref(server, f"/{number}.jpg")), range(40)
            )
        )
    assert results == [DATA] * 40
    assert 4 < server.open_requests["most"] <= remote.CONNECTIONS_PER_HOST
