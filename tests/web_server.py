"""A web server in this process that serves files from memory, answers range
requests, and fails on request.
"""

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Response = tuple[int, dict[str, str], bytes]


@dataclass
class WebServer:
    """A running server.

    Attributes:
        url: URL of the server, without a slash at its end.
        files: contents by path, for example "/a.jpg". A path includes the query.
        faults: what happens to the next requests for a path: "reset", "truncate",
            "slow" or a status such as "503".
        responses: special responses by path.
        service: answers every request, from its method, path, headers and body; None
            answers from the other attributes.
        ranges: whether the server answers range requests.
        requests: (path, value of the header Range) of each request so far.
        open_requests: number of requests that are being answered, and the largest such
            number so far.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    responses: dict[str, Callable[[dict[str, str]], Response]] = field(
        default_factory=dict
    )
    service: Callable[[str, str, dict[str, str], bytes], Response] | None = None
    ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    open_requests: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def web_server():
    """Run a server on a free port of this machine."""
    state = WebServer()
    with serving(_handler(state)) as state.url:
        yield state


@contextlib.contextmanager
def serving(handler):
    """Serve with `handler` on a free port of this machine. Yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """Keeps connections open, prints nothing, and lets clients go away."""

    protocol_version = "HTTP/1.1"
    # else each response takes 40 ms
    disable_nagle_algorithm = True

    def respond(
        self,
        status,
        headers,
        data,
        *,
        is_truncated=False,
    ):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(
                b""
                if self.command == "HEAD"
                else data[: len(data) // 2]
                if is_truncated
                else data
            )
        if is_truncated:
            self.close_connection = True

    def reset(self):
        self.connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def finish(self):
        with contextlib.suppress(OSError, ValueError):
            super().finish()


def _handler(state):
    lock = threading.Lock()

    class Files(Handler):
        def do_GET(self):
            with lock:
                state.requests.append((self.path, self.headers.get("Range", "")))
                state.open_requests["now"] += 1
                state.open_requests["most"] = max(
                    state.open_requests["most"], state.open_requests["now"]
                )
                faults = state.faults.get(self.path, [])
                fault = faults.pop(0) if faults else ""
            try:
                self._answer(fault)
            finally:
                with lock:
                    state.open_requests["now"] -= 1

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def _answer(self, fault):
            if state.service is not None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                sent = {name.title(): value for name, value in self.headers.items()}
                status, headers, data = state.service(
                    self.command, self.path, sent, body
                )
                return (
                    self._file(data, headers)
                    if status == 200
                    else self._send(status, headers, data)
                )
            if fault == "reset":
                return self.reset()
            if fault == "slow":
                time.sleep(0.2)
            if fault.isdecimal():
                self._send(int(fault), {}, b"")
            elif self.path in state.responses:
                self._send(*state.responses[self.path](dict(self.headers.items())))
            elif self.path in state.files:
                self._file(state.files[self.path], {}, is_truncated=fault == "truncate")
            else:
                self._send(404, {}, b"nothing here")

        def _file(self, data, headers, *, is_truncated=False):
            wanted = self.headers.get("Range", "") if state.ranges else ""
            if not wanted:
                return self._send(200, headers, data, is_truncated=is_truncated)
            first, last = (
                int(number) for number in wanted.removeprefix("bytes=").split("-")
            )
            if first >= len(data):
                return self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
            part = data[first : last + 1]
            content_range = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
            return self._send(
                206,
                {**headers, "Content-Range": content_range},
                part,
                is_truncated=is_truncated,
            )

        def _send(
            self,
            status,
            headers,
            data,
            *,
            is_truncated=False,
        ):
            named = {"Content-Length": str(len(data)), **headers}
            self.respond(
                status,
                [each for each in named.items() if each[1]],
                data,
                is_truncated=is_truncated,
            )
            if "Content-Length" in headers:
                self.close_connection = True

    return Files
