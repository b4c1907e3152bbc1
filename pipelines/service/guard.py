"""Checks each request before its body is read. This is the outermost layer of the service."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.service.errors import ServiceError, error_response, overloaded
from pipelines.service.metrics import Metrics
from pipelines.service.settings import ServiceSettings

OPEN_PATHS = frozenset({"/", "/app.js", "/style.css", "/favicon.svg", "/healthz"})
"""Paths that need no API key: the files of the page, which hold no data, and the health check."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """ASGI middleware that checks each request before the application sees it.

    Args:
        app: the application.
        settings: limits, API keys and accepted host names.
        metrics: metrics that count every request.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._body_bytes = 0  # of all requests together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._settings.limits.send_seconds, send)
        started = time.perf_counter()
        try:
            await self._answer(scope, receive, exchange)
        finally:
            self._metrics.count_request(scope, exchange.status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        held = 0
        try:
            self._check(scope)
            held = self._reserve(Headers(scope=scope))
            body = await self._read_body(receive, held)
        except ServiceError as error:
            self._body_bytes -= held
            response = error_response(error)
            response.headers["Connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, exchange.send)
            return
        try:
            await self._app(scope, _replay(body, receive), exchange.send)
        finally:
            self._body_bytes -= held

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        allowed = self._settings.allowed_hosts
        if allowed and _host_name(headers.get("host", "")) not in allowed:
            raise ServiceError(
                421,
                "the host name of the request is not allowed; use another host name, or ask the operator to allow it",
            )
        if self._settings.api_keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            raise ServiceError(
                401, "send a valid API key as 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"}
            )

    def _has_key(self, headers: Headers) -> bool:
        """Return True if the request has a valid API key. The comparison takes constant time."""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(sent.strip().encode(), key.encode()) for key in self._settings.api_keys]
        return scheme.lower() == "bearer" and any(matches)

    def _reserve(self, headers: Headers) -> int:
        """Reserve memory for the body of a request. Return the number of reserved bytes."""
        limits = self._settings.limits
        length, chunked = headers.get("content-length"), "transfer-encoding" in headers
        size = limits.body_bytes if chunked else int(length) if length and length.isdecimal() else 0
        if size > limits.body_bytes:
            raise ServiceError(
                413, f"the body has {size:,} bytes, over the limit of {limits.body_bytes:,}; send a smaller request"
            )
        if size and self._body_bytes + size > limits.bodies_bytes:
            raise overloaded("too many large requests are being received; try again later", 1)
        self._body_bytes += size
        return size

    async def _read_body(self, receive: Receive, held: int) -> bytes:
        if not held:
            return b""
        limits = self._settings.limits
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ServiceError(400, "the client closed the connection before the end of the request")
                    body += message.get("body", b"")
                    if len(body) > limits.body_bytes:
                        raise ServiceError(
                            413, f"the body is over the limit of {limits.body_bytes:,} bytes; send a smaller request"
                        )
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise ServiceError(
                408,
                f"the body did not arrive within {limits.body_seconds:g} s; send a smaller request or send it faster",
            ) from None


class _Exchange:
    """Sends one response. Raises TimeoutError if the client reads the response too slowly."""

    def __init__(self, send_seconds: float, send: Send) -> None:
        self._send = send
        self._send_seconds = send_seconds
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        async with asyncio.timeout(self._send_seconds):
            await self._send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` function that returns `body` first, then the messages of `receive`."""
    messages: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        for message in messages:
            return message
        return await receive()

    return replay


def _host_name(header: str) -> str:
    """Return the host name in a Host header in lower case; an empty text if the header is invalid."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""
