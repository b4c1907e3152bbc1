"""Reads files from web servers, with time-outs, retries and a limit of connections per host."""

from __future__ import annotations

import errno
import functools
import http
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edje_index.images.remote.errors import ChangedFileError, NoRangesError, OversizedFileError, UnreachableError
from edje_index.images.remote.versions import FileVersion
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    import urllib3

CONNECTIONS_PER_HOST = 8
"""Connections of one process to one host. Further requests to the host wait."""

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
MAX_SECONDS = 300.0
"""Longest time for one file, so that a server which sends a byte now and then does not block a worker."""

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


def read_web(url: str, max_bytes: int, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a whole file.

    Raises:
        FileNotFoundError, PermissionError, OSError: the server refuses the request.
        UnreachableError: the server does not respond after several attempts.
        OversizedFileError: the file is longer than `max_bytes`.
    """
    return _request(url, max_bytes, headers or {}).body


def read_web_range(
    url: str,
    size: int,
    offset: int,
    headers: Mapping[str, str] | None = None,
    *,
    version: FileVersion | None = None,
) -> bytes:
    """Return the bytes [offset, offset + size) of a file.

    Args:
        url: URL of the file.
        size: number of bytes.
        offset: first byte.
        headers: further headers of the request.
        version: version of the file that the range must belong to; None accepts any.

    Raises:
        ChangedFileError: the server has another version.
        EOFError: the file ends before the range.
        NoRangesError: the server does not answer requests for byte ranges.
        OSError: see `read_web`.
    """
    answer = _request(url, size, {**(headers or {}), "Range": f"bytes={offset}-{offset + size - 1}"}, is_range=True)
    if version is not None and version.differs(_total(answer), answer.headers.get("ETag")):
        raise ChangedFileError(url)
    if len(answer.body) != size:
        raise UnreachableError(f"the server sent {len(answer.body)} of {size} bytes", url)
    return answer.body


def web_version(url: str, headers: Mapping[str, str] | None = None) -> FileVersion:
    """Return the length of a file, and its ETag.

    Raises:
        NoRangesError: the server does not answer requests for byte ranges.
        OSError: see `read_web`.
    """
    try:
        answer = _request(url, 1, {**(headers or {}), "Range": "bytes=0-0"}, is_range=True)
    except EOFError:  # an empty file has no first byte
        return FileVersion(0)
    length = _total(answer)
    if length is None:
        raise NoRangesError(url)
    return FileVersion(length, answer.headers.get("ETag"))


def _total(answer: Answer) -> int | None:
    """Return the length of the file of which `answer` has a range; None if the server does not tell."""
    total = _TOTAL.fullmatch(answer.headers.get("Content-Range", ""))
    return None if total is None else int(total[1])


def read_web_json(url: str, headers: Mapping[str, str], max_bytes: int) -> tuple[Any, Mapping[str, str]]:
    """Return the JSON document at `url`, and the headers of the response.

    Raises:
        OSError: see `read_web`. Also raised if the document is not JSON.
    """
    answer = _request(url, max_bytes, headers)
    try:
        return json.loads(answer.body), answer.headers
    except (ValueError, RecursionError) as error:
        raise OSError(errno.EPROTO, f"the answer of {url} is not JSON: {error}") from error


def _request(url: str, max_bytes: int, headers: Mapping[str, str], *, is_range: bool = False) -> Answer:
    """Send a GET request. Repeat it if the server fails or the response is cut off."""
    with name_missing_extra("remote"):
        import urllib3.exceptions
    deadline = time.monotonic() + MAX_SECONDS
    for attempt in range(_ATTEMPTS):
        pause: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
        try:
            answer = _request_once(url, max_bytes, headers, is_range=is_range, deadline=deadline)
        except urllib3.exceptions.LocationValueError as error:
            raise OSError(errno.EINVAL, f"{url} is not a valid URL: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            problem = _reason(error)
        else:
            if answer.status not in _TEMPORARY:
                return _accepted(answer, url)
            problem = _status_text(answer.status)
            pause = min(_LONGEST_PAUSE, max(pause, _retry_after(answer)))
        if attempt + 1 < _ATTEMPTS and time.monotonic() + pause < deadline:
            time.sleep(pause)
    raise UnreachableError(f"{problem}, in the last of {_ATTEMPTS} attempts", url)


def _request_once(url: str, max_bytes: int, headers: Mapping[str, str], *, is_range: bool, deadline: float) -> Answer:
    sent = {"User-Agent": _user_agent(), "Accept-Encoding": "identity", **headers}
    response = _pool().request("GET", url, headers=sent, preload_content=False)
    try:
        if response.status >= http.HTTPStatus.MULTIPLE_CHOICES:
            return Answer(response.status, response.headers, b"")
        if is_range and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            raise NoRangesError(url)
        declared = response.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise OversizedFileError(int(declared), max_bytes, url)
        return Answer(response.status, response.headers, _read_body(response, url, max_bytes, deadline=deadline))
    finally:
        response.close()
        response.release_conn()


def _read_body(response: urllib3.BaseHTTPResponse, url: str, max_bytes: int, *, deadline: float) -> bytes:
    body = bytearray()
    for chunk in response.stream(_CHUNK, decode_content=False):
        body += chunk
        if len(body) > max_bytes:
            raise OversizedFileError(len(body), max_bytes, url)
        if time.monotonic() > deadline:
            raise UnreachableError(f"the file did not arrive within {MAX_SECONDS:g} seconds", url)
    return bytes(body)


def _accepted(answer: Answer, url: str) -> Answer:
    """Return `answer` if the request succeeded. Otherwise raise an OSError that names the problem."""
    if answer.status < http.HTTPStatus.MULTIPLE_CHOICES:
        return answer
    if answer.status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise EOFError(f"{url} ends before the requested range")
    if answer.status in _GONE:
        raise FileNotFoundError(errno.ENOENT, _status_text(answer.status), url)
    raise PermissionError(errno.EACCES, _status_text(answer.status), url)


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


@functools.cache
def _user_agent() -> str:
    from edje_index import __version__

    return f"edje-index/{__version__}"


def _retry_after(answer: Answer) -> float:
    seconds = answer.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0


def _status_text(status: int) -> str:
    try:
        return f"HTTP status {status} ({http.HTTPStatus(status).phrase})"
    except ValueError:
        return f"HTTP status {status}"


def _reason(error: Exception) -> str:
    """Return the innermost reason of an error of urllib3, without addresses of objects."""
    reason = getattr(error, "reason", None) or error
    text = re.sub(r"<[^>]*>:? ?|\S+\(host=[^)]*\)[:.]? ?", "", str(reason)).strip()
    return (text or type(reason).__name__)[:200]
