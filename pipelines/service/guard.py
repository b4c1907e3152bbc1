"""The limits of the service, its errors and metrics, and the outermost layer, which
checks each request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edje_index.errors import ModelError
from edje_index.search.rows import FilterTimeoutError
from storage_formats.errors import EdjeError, RowIdError, UsageError

logger = logging.getLogger("edje_index.service")

STATIC = Path(__file__).parent / "static"
OPEN_PATHS = frozenset(
    {
        "/",
        "/docs",
        "/healthz",
        *(f"/{path.name}" for path in STATIC.iterdir()),
    }
)
"""Paths that need no API key: the files of the page, which hold no data, and the
health check.
"""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:"
        " data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
CODES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    429: "overloaded",
    500: "internal_error",
    503: "unavailable",
    504: "deadline_exceeded",
}
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Limits:
    """Upper limits on the size and duration of requests.

    Attributes:
        body_bytes: number of bytes in the body of a request.
        bodies_bytes: number of bytes of all bodies in memory at the same time.
        connections: number of open connections.
        query_letters: number of characters in a query or text.
        documents: number of rows, images or texts in one request.
        images: number of images in one request.
        image_pixels: number of pixels of an image.
        request_pixels: number of pixels of all images in one request.
        waiting: number of requests that wait for the model.
        batch_tokens: number of image tokens of all requests in one batch.
        deadline_seconds: seconds from the arrival of the headers of a request to the
            response.
    """

    body_bytes: int = 12 << 20
    bodies_bytes: int = 128 << 20
    connections: int = 512
    query_letters: int = 2000
    documents: int = 1000
    images: int = 16
    image_pixels: int = 40_000_000
    request_pixels: int = 100_000_000
    waiting: int = 64
    batch_tokens: int = 32_768
    deadline_seconds: float = 30.0


def overloaded(message: str, retry_after: float) -> HTTPException:
    """Return an error with status 429 that tells the client to try again after
    `retry_after` seconds.
    """
    return HTTPException(429, message, {"Retry-After": str(max(1, round(retry_after)))})


async def answer_error(_: Request | None, error: Exception) -> JSONResponse:
    """Return the response for an exception. Details of internal errors are logged
    but not sent.
    """
    status = 500
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException):
        status = error.status_code
        message = str(error.detail)
    elif isinstance(error, RequestValidationError):
        # The message names the invalid fields, but does not repeat their values.
        problems = []
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"][1:]) or "body"
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "json_invalid":
                message = f"not valid JSON at character {field}"
                field = "body"
            problems.append(f"{field}: {message}"[:300])
        more = (
            f" (and {len(problems) - _SHOWN_PROBLEMS} more)"
            if len(problems) > _SHOWN_PROBLEMS
            else ""
        )
        message = "; ".join(problems[:_SHOWN_PROBLEMS]) + more
        kinds = {problem["type"] for problem in error.errors()}
        status = 400 if "json_invalid" in kinds else 422
    elif isinstance(error, FilterTimeoutError | UsageError | RowIdError | ModelError):
        status = 504 if isinstance(error, FilterTimeoutError) else 422
        message = str(error)
    elif isinstance(error, EdjeError):
        logger.error("request failed: %s", error)
        message = "the index cannot be read; see the log of the service"
    elif isinstance(error, MemoryError):
        status = 503
        message = (
            "not enough memory for this request; try again later, or send a smaller"
            " request"
        )
        headers = {"Retry-After": "5"}
    else:
        logger.error("request failed", exc_info=error)
        message = "internal error; see the log of the service"
    # The response is UTF-8, which cannot represent a lone surrogate.
    message = message.encode("utf-8", "replace").decode()
    return JSONResponse(
        {"error": {"code": CODES.get(status, "error"), "message": message}},
        status,
        headers,
    )


class Metrics:
    """The Prometheus metrics of one service.

    Attributes:
        registry: registry that holds the metrics.
        requests: number of answered requests, by route and status. Unknown routes have
            the label "other".
        seconds: durations of requests, by route.
        batches: number of requests in a batch.
        tokens: number of image tokens that the model read.
        waiting: number of requests that are waiting for the model.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "edje_requests",
            "Answered requests.",
            ["route", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "edje_request_seconds",
            "Seconds from the arrival of a request to the end of its response.",
            ["route"],
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.batches = Histogram(
            "edje_batch_requests",
            "Number of requests in a batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.tokens = Counter(
            "edje_image_tokens", "Image tokens that the model read.", registry=registry
        )
        self.waiting = Gauge(
            "edje_waiting_requests",
            "Requests that are waiting for the model.",
            registry=registry,
        )


@dataclass
class Guard:
    """ASGI middleware that checks the API key, limits bodies and durations, and cancels
    a request if its client closes the connection.

    Args:
        app: the application.
        limits: limits on the size and duration of requests.
        api_keys: valid API keys; if empty, requests need no key.
        metrics: metrics that count every request.
    """

    _app: ASGIApp
    _limits: Limits
    _api_keys: Sequence[str]
    _metrics: Metrics
    # number of body bytes of all current requests together
    _body_bytes: int = 0

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = self._limits
        method = scope["method"]
        if method == "HEAD":
            # The application answers a HEAD request like a GET request, and the server
            # sends only the headers of this response.
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        started = time.perf_counter()
        body_bytes = 0
        status = 0
        is_abandoned = False
        is_answered = False
        is_received = not {"content-length", "transfer-encoding"} & set(headers.keys())
        too_large = HTTPException(
            413,
            f"the body is over the limit of {limits.body_bytes:,} bytes; send a smaller"
            " request",
        )
        request = asyncio.current_task()
        watch = None
        assert request is not None

        async def cancel_if_client_leaves() -> None:
            nonlocal is_abandoned
            # After the body, `receive` returns only when the client closes the
            # connection or the response is complete.
            await receive()
            if not is_answered:
                is_abandoned = True
                request.cancel()

        async def receive_body() -> Message:
            nonlocal body_bytes, is_received, watch
            message = await receive()
            size = len(message.get("body", b""))
            body_bytes += size
            self._body_bytes += size
            if body_bytes > limits.body_bytes:
                raise too_large
            if self._body_bytes > limits.bodies_bytes:
                raise overloaded(
                    "too many large requests are being received; try again later", 1
                )
            if not message.get("more_body"):
                is_received = True
                watch = asyncio.create_task(cancel_if_client_leaves())
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, is_answered
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    response_headers.setdefault(name, value)
                if not is_received:
                    # The rest of the body is not read, so the connection cannot carry
                    # another request.
                    response_headers["Connection"] = "close"
            elif not message.get("more_body"):
                is_answered = True
            await send(message)

        error: Exception | None = None
        try:
            if self._api_keys and scope["path"] not in OPEN_PATHS:
                scheme, _, sent = headers.get("authorization", "").partition(" ")
                # Every key is compared in constant time, so that the duration of the
                # comparison tells nothing about the keys.
                matches = [
                    hmac.compare_digest(sent.strip().encode(), key.encode())
                    for key in self._api_keys
                ]
                if scheme.lower() != "bearer" or not any(matches):
                    authenticate = {"WWW-Authenticate": "Bearer"}
                    raise HTTPException(
                        401,
                        "send a valid API key as 'Authorization: Bearer KEY'",
                        authenticate,
                    )
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if method == "POST" and kind != "application/json":
                # A form on the page of another website can make a browser send other
                # content types to this service. For JSON, the browser first asks the
                # service for permission.
                raise HTTPException(
                    415,
                    "send JSON with the header 'Content-Type: application/json'; with"
                    " curl, add -H 'Content-Type: application/json'",
                )
            if int(headers.get("content-length", "0")) > limits.body_bytes:
                raise too_large
            async with asyncio.timeout(limits.deadline_seconds):
                await self._app(scope, receive_body, send_with_headers)
        except TimeoutError:
            seconds = f"{limits.deadline_seconds:g} s"
            error = HTTPException(
                504,
                f"no response within the deadline of {seconds}; send less or try again"
                " later",
            )
            if not is_received:
                error = HTTPException(
                    408,
                    f"the body did not arrive within {seconds}; send less, or send it"
                    " faster",
                )
        except asyncio.CancelledError:
            if not is_abandoned:
                raise
            request.uncancel()
        except Exception as problem:
            # Either this layer refused the request, or the application failed. In the
            # second case, the application has already sent status 500.
            error = problem
        finally:
            if watch is not None:
                watch.cancel()
            self._body_bytes -= body_bytes
            if error is not None and not status:
                await (await answer_error(None, error))(
                    scope, receive, send_with_headers
                )
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status or "none")).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - started)
