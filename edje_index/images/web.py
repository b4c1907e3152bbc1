"""Reads files from web servers, with time-outs, retries and a limit of connections per host."""

from __future__ import annotations

import errno
import functools
import http.client
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edje_index.images.urls import UnreachableError
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    import urllib3

CONNECTIONS_PER_HOST = 8
"""Connections of one process to one host. Further requests to the host wait."""

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
MAX_SECONDS = 300.0
"""Longest time for one file, so that a server which sends a byte now and then does not block a worker."""

NO_RANGES = "the server does not answer requests for byte ranges; download the file"

_ATTEMPTS = 4
_FIRST_PAUSE = 0.5  # seconds; doubled after each attempt
_LONGEST_PAUSE = 10
_HOSTS = 256  # hosts whose connections stay open
_MAX_REDIRECTS = 5
_CHUNK = 1 << 20
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
_GONE = frozenset({404, 410})
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")


@dataclass(frozen=True)
class Answer:
    """A response of a server: its status, headers and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def total(self) -> int | None:
        """Length of the whole file, if the body is a range of it; None if the response does not tell."""
        total = _TOTAL.fullmatch(self.headers.get("Content-Range", ""))
        return None if total is None else int(total[1])


def request(url: str, headers: Mapping[str, str], max_bytes: int) -> Answer:
    """Send a GET request. Repeat it if the server fails or the response is cut off.

    Raises:
        FileNotFoundError, PermissionError, OSError: the server refuses the request.
        EOFError: the file ends before the requested range.
        UnreachableError: the server does not respond after several attempts.
        OSError: the answer is longer than `max_bytes` (EFBIG), or no range although one was requested (EOPNOTSUPP).
    """
    with name_missing_extra("remote"):
        import urllib3.exceptions
    deadline = time.monotonic() + MAX_SECONDS
    for attempt in range(_ATTEMPTS):
        pause: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
        try:
            answer = _request_once(url, headers, max_bytes, deadline)
        except urllib3.exceptions.LocationValueError as error:
            raise OSError(errno.EINVAL, f"{url} is not a valid URL: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            problem = _reason(error)
        else:
            if answer.status < http.HTTPStatus.MULTIPLE_CHOICES:
                return answer
            problem = f"HTTP status {answer.status} ({http.client.responses.get(answer.status, 'unknown')})"
            if answer.status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise EOFError(f"{url} ends before the requested range")
            if answer.status in _GONE:
                raise FileNotFoundError(errno.ENOENT, problem, url)
            if answer.status not in _TEMPORARY:
                raise PermissionError(errno.EACCES, problem, url)
            seconds = answer.headers.get("Retry-After", "")
            pause = min(_LONGEST_PAUSE, max(pause, float(seconds) if seconds.isdecimal() else 0.0))
        if attempt + 1 < _ATTEMPTS and time.monotonic() + pause < deadline:
            time.sleep(pause)
    raise UnreachableError(f"{problem}, in the last of {_ATTEMPTS} attempts", url)


def _request_once(url: str, headers: Mapping[str, str], max_bytes: int, deadline: float) -> Answer:
    from edje_index import __version__

    sent = {"User-Agent": f"edje-index/{__version__}", "Accept-Encoding": "identity", **headers}
    response = _pool().request("GET", url, headers=sent, preload_content=False)
    try:
        if response.status >= http.HTTPStatus.MULTIPLE_CHOICES:
            return Answer(response.status, response.headers, b"")
        if "Range" in headers and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            raise OSError(errno.EOPNOTSUPP, NO_RANGES, url)
        declared = response.headers.get("Content-Length", "")
        length, body = int(declared) if declared.isdecimal() else 0, bytearray()
        chunks = response.stream(_CHUNK, decode_content=False)
        while length <= max_bytes and (chunk := next(chunks, b"")):
            body += chunk
            length = max(length, len(body))
            if time.monotonic() > deadline:
                raise UnreachableError(f"the file did not arrive within {MAX_SECONDS:g} seconds", url)
        if length > max_bytes:
            raise OSError(errno.EFBIG, f"{length} bytes is over the limit of {max_bytes}", url)
        return Answer(response.status, response.headers, bytes(body))
    finally:
        response.close()
        response.release_conn()


@functools.cache
def _pool() -> urllib3.PoolManager:
    """Return the connection pool of this process."""
    import urllib3

    return urllib3.PoolManager(
        num_pools=_HOSTS,
        maxsize=CONNECTIONS_PER_HOST,
        block=True,
        timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
        retries=urllib3.Retry(total=_MAX_REDIRECTS, connect=0, read=0, status=0, other=0, redirect=_MAX_REDIRECTS),
    )


def _reason(error: Exception) -> str:
    """Return the innermost reason of an error of urllib3, without addresses of objects."""
    reason = getattr(error, "reason", None) or error
    text = re.sub(r"<[^>]*>:? ?|\S+\(host=[^)]*\)[:.]? ?", "", str(reason)).strip()
    return (text or type(reason).__name__)[:200]
