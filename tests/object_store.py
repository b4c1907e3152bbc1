"""A real S3-compatible server in a process of its own, and an HTTP proxy that injects faults in front of it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Fault = str | None
"""What happens to a request: "reset", "503", "slow", "truncate", "lost" (done, but the response is lost), or None."""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start the server of moto on a free port of this machine. Yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError("the S3 server has not started")


def make_bucket(endpoint: str, name: str) -> None:
    """Create a bucket."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let `s3://` URLs lead to `endpoint`."""
    values = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    for name, value in {**values, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)


@dataclass
class FaultyProxy:
    """Forwards HTTP requests to `upstream`, and disturbs those for which `fault(method, path)` returns a fault.

    Attributes:
        requests: (method, path, value of the header Range) of each request so far.
    """

    upstream: str
    fault: Callable[[str, str], Fault] = lambda method, path: None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""

    def count(self, method: str, part: str) -> int:
        """Number of requests so far with this method, whose path contains `part`."""
        return sum(each[0] == method and part in each[1] for each in self.requests)

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def every(count: int, fault: str, part: str = "") -> Callable[[str, str], Fault]:
    """Return a function that disturbs every `count`-th request whose path contains `part`."""
    numbers, lock = iter(range(1, 1 << 60)), threading.Lock()

    def decide(method: str, path: str) -> Fault:
        if part not in path:
            return None
        with lock:
            return fault if next(numbers) % count == 0 else None

    return decide


# The server demands a signature, but does not check it. The proxy adds this one to requests without one.
_SCOPE = "key/20260101/us-east-1/s3/aws4_request"
_SIGNATURE = {"Authorization": f"AWS4-HMAC-SHA256 Credential={_SCOPE}, SignedHeaders=host, Signature=0"}


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            proxy.requests.append((self.command, self.path, self.headers.get("Range", "")))
            fault = proxy.fault(self.command, self.path)
            if fault == "reset":
                return self._reset()
            if fault == "503":
                return self._send(503, [("Content-Length", "0")], b"")
            if fault == "slow":
                time.sleep(0.3)
            connection = http.client.HTTPConnection(proxy.upstream.removeprefix("http://"), timeout=60)
            connection.request(self.command, self.path, body, {**_SIGNATURE, **dict(self.headers.items())})
            response = connection.getresponse()
            data = response.read()
            connection.close()
            if fault == "lost":
                return self._reset()
            headers = [
                each for each in response.getheaders() if each[0].lower() not in ("connection", "server", "date")
            ]
            return self._send(response.status, headers, data, is_truncated=fault == "truncate")

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        def _send(
            self, status: int, headers: list[tuple[str, str]], data: bytes, *, is_truncated: bool = False
        ) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data[: len(data) // 2] if is_truncated else data)
            if is_truncated:
                self.close_connection = True

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

        def finish(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().finish()

        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().handle()

    return Handler
