"""Errors of the service, with bodies of the form `{"error": {"code": ..., "message": ...}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from edje_index.errors import ModelError
from edje_index.search.row_filters import FilterTimeoutError
from storage_formats.errors import EdjeError, RowIdError, UsageError

logger = logging.getLogger("edje_index.service")

_CODES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    421: "wrong_host",
    422: "invalid_request",
    429: "overloaded",
    500: "internal_error",
    503: "unavailable",
    504: "deadline_exceeded",
}
_SHOWN_PROBLEMS = 5


class ServiceError(Exception):
    """An error that the service sends to the client.

    Attributes:
        status: HTTP status.
        message: text on what is wrong and what the client can do.
        headers: additional headers of the response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def overloaded(message: str, retry_after: float) -> ServiceError:
    """Return an error with status 429 that tells the client to try again after `retry_after` seconds."""
    return ServiceError(429, message, {"Retry-After": str(max(1, round(retry_after)))})


def error_content(status: int, message: str) -> dict[str, dict[str, str]]:
    """Return the body of an error as a JSON object."""
    text = message.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
    return {"error": {"code": _CODES.get(status, "error"), "message": text}}


def error_response(error: ServiceError) -> JSONResponse:
    """Return the HTTP response for `error`."""
    return JSONResponse(error_content(error.status, error.message), error.status, headers=error.headers)


def as_service_error(error: Exception) -> ServiceError:
    """Convert an exception to a ServiceError. Details of internal errors are logged but not sent."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, FilterTimeoutError):
        return ServiceError(504, str(error))
    if isinstance(error, UsageError | RowIdError | ModelError):
        return ServiceError(422, str(error))
    if isinstance(error, EdjeError):
        logger.error("request failed: %s", error)
        return ServiceError(500, "the index cannot be read; see the log of the service")
    if isinstance(error, MemoryError):
        return ServiceError(
            503, "not enough memory for this request; try again later, or send a smaller request", {"Retry-After": "5"}
        )
    logger.error("request failed", exc_info=error)
    return ServiceError(500, "internal error; see the log of the service")


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers to `app`, so that every error response has the same form."""

    async def handle(_: Request, error: Exception) -> JSONResponse:
        return error_response(as_service_error(error))

    async def handle_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(ServiceError(error.status_code, str(error.detail), error.headers))

    async def handle_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        is_json = all(problem["type"] != "json_invalid" for problem in error.errors())
        return error_response(ServiceError(422 if is_json else 400, _describe(error)))

    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(RequestValidationError, handle_invalid)
    app.add_exception_handler(ServiceError, handle)
    app.add_exception_handler(EdjeError, handle)
    app.add_exception_handler(MemoryError, handle)
    app.add_exception_handler(Exception, handle)


def _describe(error: RequestValidationError) -> str:
    """Return a text on why the request is invalid, without the values that the client sent."""
    problems = [
        f"{'.'.join(str(part) for part in problem['loc'][1:]) or 'body'}: {problem['msg']}"[:300]
        for problem in error.errors()
    ]
    more = f" (and {len(problems) - _SHOWN_PROBLEMS} more)" if len(problems) > _SHOWN_PROBLEMS else ""
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + more
