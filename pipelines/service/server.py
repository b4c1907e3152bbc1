"""Runs the service until a signal stops it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from pipelines.service.app import create_app
from pipelines.service.connections import timed_protocol
from pipelines.service.indexes import ServedIndexes
from pipelines.service.settings import ServiceSettings
from storage_formats.errors import UsageError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`. Port 0 selects a free port.

    Raises:
        UsageError: the service cannot listen at this address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; correct the host or the port"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a service that listens on the socket `listener`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_service(
    indexes: ServedIndexes, settings: ServiceSettings, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Answer requests until SIGTERM or SIGINT. Then answer the requests that have arrived, and return.

    Args:
        indexes: the open indexes.
        settings: limits, API keys and accepted host names.
        listener: a socket that `listen` returned.
        on_ready: called once, when the service answers, and SIGTERM and SIGINT stop it.
    """
    limits = settings.limits
    config = uvicorn.Config(
        create_app(indexes, settings),
        http=timed_protocol(limits.body_seconds),
        loop="asyncio",
        lifespan="on",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.deadline_seconds) + 1,
    )
    server = _Server(config, on_ready)
    with _signals_end_quietly(server):
        server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that calls `on_ready` when it answers and handles signals."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


@contextmanager
def _signals_end_quietly(server: uvicorn.Server) -> Iterator[None]:
    """Context manager that ignores SIGTERM and SIGINT when `server` has started, except while uvicorn handles them."""
    # Uvicorn raises a signal again after it has stopped. Without this context, a requested stop looks like a failure.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _frame: object) -> None:
        if not server.started:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
