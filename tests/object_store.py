"""A real S3-compatible server in a process of its own, and an HTTP proxy that
injects faults in front of it.
"""

import contextlib
import functools
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.web_server import Handler, serving

Fault = str | None
"""What happens to a request: "reset", "403", "503", "slow", "truncate", "lost" (done,
but the response is lost), "twice" (done twice), "late" (lost, but done by
`FaultyProxy.do_late_requests`), or None.
"""


_KEY = "key"
_SECRET = "a-secret-of-sixteen"
_ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]
_IDENTITIES = [
    {
        "name": "owner",
        "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
        "actions": _ACTIONS,
    },
    {"name": "anonymous", "actions": ["Read:public"]},
]
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


@contextlib.contextmanager
def s3_server():
    """Start SeaweedFS on free ports of this machine. Yield the URL of its S3 server."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "identities.json")
        config.write_text(json.dumps({"identities": _IDENTITIES}))
        names = (*_PORTS, "s3.port", "s3.port.grpc")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        settings = {
            **ports,
            "dir": folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3": "true",
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
        }
        command = [
            Path(sys.executable).with_name("weed"),
            "server",
            *(f"-{key}={value}" for key, value in settings.items()),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(ports["s3.port"], process)
            yield f"http://127.0.0.1:{ports['s3.port']}"
        finally:
            process.kill()
            process.wait()


def _free_ports(count):
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for(port, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1),
        ):
            return
        time.sleep(0.02)
    raise RuntimeError("the S3 server has not started")


def use_endpoint(monkeypatch, endpoint):
    """Let `s3://` URLs lead to `endpoint`."""
    values = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
    for name, value in {
        **values,
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
    }.items():
        monkeypatch.setenv(name, value)


@dataclass
class FaultyProxy:
    """Forwards HTTP requests to `upstream`, and disturbs those for which `fault(method,
    path)` returns a fault.

    Attributes:
        requests: (method, path, value of the header Range) of each request so far.
    """

    upstream: str
    fault: Callable[[str, str], Fault] = lambda method, path: None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""
    late: list[Callable[[], object]] = field(default_factory=list)

    def do_late_requests(self):
        while self.late:
            self.late.pop()()

    def count(self, method, part):
        """Number of requests so far with this method, whose path contains `part`."""
        return sum(each[0] == method and part in each[1] for each in self.requests)

    @contextlib.contextmanager
    def running(self):
        with serving(_handler(self)) as self.url:
            yield self


def every(count, fault, part=""):
    """Return a function that disturbs every `count`-th request whose path contains
    `part`.
    """
    numbers = iter(range(1, 1 << 60))
    lock = threading.Lock()

    def decide(method, path):
        if part not in path:
            return None
        with lock:
            return fault if next(numbers) % count == 0 else None

    return decide


def _handler(proxy):
    class Forwarded(Handler):
        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            proxy.requests.append(
                (self.command, self.path, self.headers.get("Range", ""))
            )
            fault = proxy.fault(self.command, self.path)
            if fault == "reset":
                return self.reset()
            if fault in ("403", "503"):
                return self.respond(int(fault), [("Content-Length", "0")], b"")
            if fault == "slow":
                time.sleep(0.3)
            forward = functools.partial(
                self._forward, self.command, self.path, body, dict(self.headers.items())
            )
            if fault == "late":
                proxy.late.append(forward)
                return self.reset()
            status, headers, data = forward()
            if fault == "twice":
                forward()
            if fault == "lost":
                return self.reset()
            return self.respond(status, headers, data, is_truncated=fault == "truncate")

        @staticmethod
        def _forward(*request):
            connection = http.client.HTTPConnection(
                proxy.upstream.removeprefix("http://"), timeout=60
            )
            connection.request(*request)
            response = connection.getresponse()
            data = response.read()
            connection.close()
            left_out = ("connection", "server", "date")
            return (
                response.status,
                [
                    each
                    for each in response.getheaders()
                    if each[0].lower() not in left_out
                ],
                data,
            )

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

    return Forwarded
