"""Runs the service until a signal stops it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from edje_index import __version__
from edje_index.search.token_index import TokenIndex
from pipelines.service import dialects, routes
from pipelines.service.batching import Batcher
from pipelines.service.guard import STATIC, Guard, Limits, Metrics, answer_error, logger
from pipelines.service.state import ServiceState
from storage_formats.arguments import as_count
from storage_formats.errors import EdjeError, UsageError

_WARM_UP_POOL = 32
# time between two checks whether the index has changed
_WATCH_SECONDS = 2.0
# A connection is closed if the headers of a request take longer than this time, or if
# the client does not read an answer for this time.
_PATIENCE_SECONDS = 10.0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`. Port 0 selects a free port.

    Raises:
        UsageError: the service cannot listen at this address.
    """
    port = as_count(port, "port", 0, 65_535)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host}:{port}: {reason}; choose another host or port"
        ) from error
    # Without TCP_NODELAY, the body of a response would wait 40 ms until the client has
    # acknowledged the headers. Connections inherit the option from this socket. asyncio
    # does not set it, because this socket was created without a protocol number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # With TCP_USER_TIMEOUT, which only Linux has, the system closes a connection whose
    # client does not read.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(1000 * _PATIENCE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a service that listens on the socket `listener`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_warm(
    path: Path,
    model: Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> TokenIndex:
    """Open the index at `path`, load the whole model and run it once, so that the first
    request is as fast as others.

    The arguments and errors are those of `TokenIndex.open`.
    """
    opened: Future[TokenIndex] = Future()

    def load() -> None:
        try:
            index = TokenIndex.open(path, model, device=device, dtype=dtype)
            _ = index.model.image_encoder
            if index.manifest.counts.indexed:
                index.search("a photo of a dog on a beach", 1, _WARM_UP_POOL)
            opened.set_result(index)
        except BaseException as error:
            opened.set_exception(error)

    # Each thread that computes gets OpenMP threads, which end with it. If this thread
    # kept some, there would be more of them than CPUs beside those of the model thread.
    # Then OpenMP threads sleep between any two products, and a search on two CPUs takes
    # 42 instead of 33 ms.
    try:
        Thread(target=load, daemon=True).start()
    except RuntimeError:
        # the system allows no further thread
        load()
    return opened.result()


async def follow_changes(state: ServiceState) -> None:
    """Check every two seconds whether the index has changed, and open its new snapshot.
    This coroutine runs until its task is cancelled.
    """
    # The same problem is logged once, not at every check.
    before = ""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        problem = lasting = ""
        try:
            state.index = await state.files.run(state.index.at_current_snapshot)
        except Exception as error:
            problem = str(error) or type(error).__name__
            # Any other problem may be temporary.
            lasting = problem if isinstance(error, UsageError) else ""
        state.problem = lasting
        if problem and problem != before:
            logger.warning(
                "the service keeps using the earlier snapshot of %s: %s",
                state.name,
                problem,
            )
        before = problem


class Connection(H11Protocol):
    """A connection that is closed if the headers of a request do not arrive in time."""

    _deadline: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # If a request is being answered, its headers have arrived, and `Guard` limits
        # the time for its body. Otherwise, the data belong to the headers of the next
        # request, which have a new deadline.
        if self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(_PATIENCE_SECONDS, self.transport.abort)


def run_service(
    index: TokenIndex,
    limits: Limits,
    listener: socket.socket,
    on_ready: Callable[[], None],
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Answer requests until SIGTERM or SIGINT. Then answer the requests that have
    arrived, and return.

    A connection is closed if the headers of a request do not arrive within 10 seconds.
    Uvicorn has no such limit: 600 connections that send nothing, or only a part of the
    headers, would keep the service from answering other clients. On Linux, a connection
    is also closed if the client reads nothing of an answer for 10 seconds. A connection
    that waits for its next request is closed after 75 seconds.

    Args:
        index: the open index.
        limits: limits on the size and duration of requests.
        listener: a socket that `listen` returned.
        on_ready: called once, when the service answers.
        api_keys: valid API keys. Each request must send one of these keys. If empty,
            requests need no key.
        allowed_hosts: host names that the Host header may contain; if empty, any host
            name is accepted. Checking the header protects a service on loopback from
            DNS rebinding.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        name = Path(index.root).name.removesuffix(".edje") or "index"
        batcher = Batcher(limits, metrics, index.manifest.spec.block_shape[0])
        app.state.service = state = ServiceState(index, name, limits, metrics, batcher)
        watch = asyncio.create_task(follow_changes(state))
        on_ready()
        yield
        watch.cancel()

    # The documentation pages of FastAPI load scripts from a CDN, so they are off;
    # static/docs.html shows /openapi.json.
    app = FastAPI(
        title="edje-index",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(routes.router)
    app.include_router(dialects.router)
    app.add_route(
        "/docs", lambda _: FileResponse(STATIC / "docs.html"), include_in_schema=False
    )
    # Static files answer the paths that have no route. They are not mounted: if a
    # request uses a wrong method for a route, a mount would answer it with status 404
    # instead of 405.
    app.router.default = StaticFiles(directory=STATIC, html=True)
    for kind in (
        HTTPException,
        RequestValidationError,
        EdjeError,
        MemoryError,
        Exception,
    ):
        app.add_exception_handler(kind, answer_error)
    guarded = Guard(
        TrustedHostMiddleware(app, list(allowed_hosts) or ["*"], www_redirect=False),
        limits,
        api_keys,
        metrics,
    )
    config = uvicorn.Config(
        guarded,
        http=Connection,
        loop="asyncio",
        lifespan="on",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=64 << 10,
        # Reverse proxies reuse a connection for up to 60 s. The service keeps its
        # connections longer, so that it closes none while a proxy sends a request.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(limits.deadline_seconds) + 1,
    )
    server = uvicorn.Server(config)
    # After uvicorn has stopped because of a signal, it raises the signal again. These
    # handlers receive the repeated signal. Otherwise, the signal would end the process,
    # and a requested stop would look like a failure. The handlers also receive a signal
    # that comes before uvicorn sets its own.
    handlers = {
        number: signal.signal(number, server.handle_exit)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
