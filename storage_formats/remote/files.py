"""Reads files in object stores, on web servers and on the Hugging Face Hub, by their
URLs.

URLs of the Hub are `hf://datasets/OWNER/NAME[@REVISION]/PATH`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import importlib
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from storage_formats.errors import EdjeError
from storage_formats.extras import name_missing_extra
from storage_formats.remote.objects import (
    ObjectChangedError,
    ObjectFolder,
    ObjectStoreError,
)
from storage_formats.remote.urls import (
    HUB_SCHEME,
    STORE_SCHEMES,
    hub_address,
    hub_kind,
    scheme_of,
    web_address,
)

if TYPE_CHECKING:
    import urllib3

# maximum number of buckets whose connections stay open
_BUCKETS = 32
# maximum length of a page of a list of files
_MAX_PAGE_BYTES = 64 << 20
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')

CONNECTIONS_PER_HOST = 8
"""Maximum number of connections of one process to one host. Further requests to the
host wait for a free connection.
"""

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
MAX_SECONDS = 300.0
"""Longest time for one file. A server that sends only a byte now and then never exceeds
`READ_SECONDS`, and would block a worker without this limit.
"""

_NO_RANGES = "the server does not answer requests for byte ranges; download the file"

_ATTEMPTS = 4
# seconds between the first two attempts; each further pause is twice as long
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10
# maximum number of hosts whose connections stay open
_HOSTS = 256
_MAX_REDIRECTS = 5
_CHUNK = 1 << 20
# HTTP statuses after which a request is sent again
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
# HTTP statuses of a file that does not exist
_GONE = frozenset({404, 410})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-\d+/(?:(\d{1,19})|\*)")


class FileVersion(NamedTuple):
    """A version of a file on a server, as the server describes it. Readers compare
    versions so that they never combine ranges of two versions.

    Attributes:
        length: length of the file in bytes.
        etag: identifier of the contents; None if the server sends none.
        modified: value of the header Last-Modified; None if the server sends none.
    """

    length: int
    etag: str | None = None
    modified: str | None = None


class UnreachableError(OSError):
    """A server does not respond, or cannot respond now. A later attempt may succeed."""


class ChangedFileError(OSError):
    """A file on a server has changed while it was read."""


def _changed(url: str) -> ChangedFileError:
    reason = "the file on the server has changed while it was read"
    return ChangedFileError(errno.EPROTO, reason, url)


def _unreachable(reason: str, url: str) -> UnreachableError:
    return UnreachableError(errno.EHOSTUNREACH, reason, url)


def require_libraries(url: str) -> None:
    """Raise MissingExtraError if the library that reads `url` is not installed."""
    with name_missing_extra("remote"):
        importlib.import_module(
            "obstore" if scheme_of(url) in STORE_SCHEMES else "urllib3"
        )


def read_remote(url: str, max_bytes: int) -> bytes:
    """Return a whole file.

    Raises:
        FileNotFoundError, PermissionError: there is no such file, or the server refuses
            the request.
        UnreachableError: the server does not respond.
        OSError: the file is longer than `max_bytes` (EFBIG).
        MissingExtraError: the library that reads `url` is not installed.
        ValueError: a URL of the Hub names no repository, or the token is not valid.
    """
    if scheme_of(url) not in STORE_SCHEMES:
        return _request(*web_address(url), max_bytes)[1]
    with _object(url) as (bucket, key):
        return bucket.read(key, max_bytes).data


def read_remote_range(url: str, size: int, offset: int, version: FileVersion) -> bytes:
    """Return the bytes [offset, offset + size) of a file.

    Raises:
        ChangedFileError: the server has another version of the file than `version`.
        OSError, MissingExtraError, ValueError: see `read_remote`.
    """
    try:
        if scheme_of(url) in STORE_SCHEMES:
            with _object(url) as (bucket, key):
                return bytes(
                    bucket.read_range(key, offset, offset + size, etag=version.etag)
                )
        current, data = _web_range(url, offset, size)
    except EOFError as error:
        # the file ends before the range
        raise _changed(url) from error
    # The servers behind one host name may send different ETags for the same version. So
    # a different ETag means another version only if the modification times differ or
    # are missing.
    is_same_time = version.modified is not None and version.modified == current.modified
    is_other = (
        None not in (current.etag, version.etag)
        and current.etag != version.etag
        and not is_same_time
    )
    # the current length is -1 if the server does not tell the length
    if is_other or current.length not in (-1, version.length):
        raise _changed(url)
    if len(data) != size:
        raise _unreachable(f"the server sent {len(data)} of {size} bytes", url)
    return data


def remote_version(url: str) -> FileVersion:
    """Return the current version of a file.

    Raises:
        OSError: a web server does not answer requests for byte ranges (EOPNOTSUPP).
        OSError, MissingExtraError, ValueError: see `read_remote`.
    """
    if scheme_of(url) in STORE_SCHEMES:
        with _object(url) as (bucket, key):
            info = bucket.info(key)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", url)
        return FileVersion(info.size, info.etag)
    try:
        version, _ = _web_range(url, 0, 1)
    except EOFError:
        # an empty file has no first byte
        return FileVersion(0)
    if version.length < 0:
        raise OSError(errno.EOPNOTSUPP, _NO_RANGES, url)
    return version


def _web_range(url: str, offset: int, size: int) -> tuple[FileVersion, bytes]:
    """Request a range of a file. Return the version of the file and the bytes.

    If the server does not tell the length of the file, the length in the version is -1.
    Raises OSError (EPROTO) if the server sends another range.
    """
    address, headers = web_address(url)
    answered, data = _request(
        address, {**headers, "Range": f"bytes={offset}-{offset + size - 1}"}, size
    )
    length = -1
    if sent := _CONTENT_RANGE.fullmatch(answered.get("Content-Range", "")):
        if int(sent[1]) != offset:
            raise OSError(
                errno.EPROTO,
                f"the server sent the bytes from {sent[1]} on in place of those from"
                f" {offset} on; download the file",
                url,
            )
        length = int(sent[2] or -1)
    return (
        FileVersion(length, answered.get("ETag"), answered.get("Last-Modified")),
        data,
    )


def list_remote_folder(url: str) -> tuple[dict[str, int], list[str]] | None:
    """Return the contents of a directory; None if the server lists no directories.

    Returns:
        (sizes of the files by name, names of the subdirectories).

    Raises:
        OSError, ValueError, MissingExtraError: see `read_remote`.
    """
    if scheme_of(url) in STORE_SCHEMES:
        with _object(url.rstrip("/")) as (bucket, key):
            return bucket.list_folder(key)
    if scheme_of(url) != HUB_SCHEME:
        return None
    files: dict[str, int] = {}
    directories: list[str] = []
    server, repository, revision, path, headers = hub_address(url)
    kind = "models/" if hub_kind(url) == "models" else ""
    tree = f"{server}/api/{kind}{repository}/tree"
    page = f"{tree}/{quote(revision, safe='')}/{quote(path)}".rstrip("/")
    pages: set[str] = set()
    while page not in pages:
        pages.add(page)
        # the token of the Hub must not be sent to another server
        is_hub = urlsplit(page)[:2] == urlsplit(server)[:2]
        answered, body = _request(page, headers if is_hub else {}, _MAX_PAGE_BYTES)
        try:
            for entry in json.loads(body):
                name = str(entry["path"]).rpartition("/")[2]
                if entry["type"] == "directory":
                    directories.append(name)
                else:
                    files[name] = int(entry["size"])
            following = _NEXT.search(answered.get("Link", ""))
            if following is None:
                return files, directories
            page = urljoin(page, following[1])
        except (
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise OSError(
                errno.EPROTO, f"the answer of {page} is no list of files: {error!r}"
            ) from error
    raise OSError(
        errno.EPROTO,
        f"the list of files continues at {page}, which was read before; check"
        " HF_ENDPOINT",
    )


@contextlib.contextmanager
def _object(url: str) -> Iterator[tuple[ObjectFolder, str]]:
    """Yield the bucket in the URL of an object, and the key of the object.
    Translate the errors of the store.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    try:
        yield _bucket(f"{scheme}://{bucket}"), key
    except ObjectChangedError as error:
        raise _changed(url) from error
    except ObjectStoreError as error:
        raise _unreachable(str(error), url) from error


_bucket = functools.lru_cache(_BUCKETS)(ObjectFolder.open)


def _request(
    url: str, headers: Mapping[str, str], max_bytes: int
) -> tuple[Mapping[str, str], bytes]:
    """Send a GET request. Send the request again if the server fails or the response
    ends early.

    Returns:
        The headers of the response, and its body.

    Raises:
        FileNotFoundError, PermissionError, OSError: the server refuses the request.
        EOFError: the file ends before the requested range.
        UnreachableError: the server does not respond after several attempts.
        OSError: the answer is longer than `max_bytes` (EFBIG), the server sends the
            whole file instead of the requested range (EOPNOTSUPP), or the URL is not
            valid (EINVAL).
    """
    with name_missing_extra("remote"):
        import urllib3

    sent = {
        "User-Agent": f"edje-index/{importlib.metadata.version('edje-index')}",
        "Accept-Encoding": "identity",
        **headers,
    }
    deadline = time.monotonic() + MAX_SECONDS
    for attempt in range(_ATTEMPTS):
        pause: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
        try:
            address = urllib3.util.parse_url(url)
            proxy = getproxies().get(str(address.scheme))
            if proxy_bypass(str(address.netloc)):
                proxy = None
            pool = _pool(proxy)
            response = pool.request("GET", url, headers=sent, preload_content=False)
            try:
                if response.status < http.HTTPStatus.MULTIPLE_CHOICES:
                    if (
                        "Range" in headers
                        and response.status != http.HTTPStatus.PARTIAL_CONTENT
                    ):
                        raise OSError(errno.EOPNOTSUPP, _NO_RANGES, url)
                    return response.headers, _body(response, url, max_bytes, deadline)
            finally:
                response.close()
                response.release_conn()
        except urllib3.exceptions.LocationValueError as error:
            raise OSError(errno.EINVAL, f"{url} is not a valid URL: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            # The message is that of the innermost error, without the descriptions of
            # Python objects that urllib3 adds.
            reason = getattr(error, "reason", None) or error
            problem = re.sub(
                r"<[^>]*>:? ?|\S+\(host=[^)]*\)[:.]? ?", "", str(reason)
            ).strip()[:200]
            problem = problem or type(reason).__name__
        else:
            status = response.status
            problem = (
                f"HTTP status {status} ({http.client.responses.get(status, 'unknown')})"
            )
            if status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise EOFError(f"{url} ends before the requested range")
            if status in _GONE:
                raise FileNotFoundError(errno.ENOENT, problem, url)
            if status not in _TEMPORARY:
                raise PermissionError(errno.EACCES, problem, url)
            seconds = response.headers.get("Retry-After", "")
            pause = min(
                _LONGEST_PAUSE,
                max(pause, float(seconds) if seconds.isdecimal() else 0.0),
            )
        if attempt + 1 < _ATTEMPTS and time.monotonic() + pause < deadline:
            time.sleep(pause)
    raise _unreachable(f"{problem}, in the last of {_ATTEMPTS} attempts", url)


def _body(
    response: urllib3.BaseHTTPResponse, url: str, max_bytes: int, deadline: float
) -> bytes:
    declared = response.headers.get("Content-Length", "")
    length = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    # `read1` returns the bytes that have arrived and does not wait for a whole chunk,
    # so that a slow server cannot delay the check of the deadline.
    while length <= max_bytes and (
        chunk := response.read1(_CHUNK, decode_content=False)
    ):
        body += chunk
        length = max(length, len(body))
        if time.monotonic() > deadline:
            raise _unreachable(
                f"the file did not arrive within {MAX_SECONDS:g} seconds", url
            )
    if length > max_bytes:
        raise OSError(
            errno.EFBIG, f"{length} bytes is over the limit of {max_bytes}", url
        )
    return bytes(body)


@functools.cache
def _pool(proxy: str | None) -> urllib3.PoolManager:
    """Return the connection pool of this process. If `proxy` is not None, connections
    go through the proxy at this URL.
    """
    import urllib3

    manager: Callable[..., urllib3.PoolManager] = urllib3.PoolManager
    if proxy is not None:
        address = urllib3.util.parse_url(proxy if "://" in proxy else f"http://{proxy}")
        if address.scheme not in ("http", "https"):
            raise EdjeError(
                "the proxy in HTTP_PROXY or HTTPS_PROXY is no web proxy; give"
                " http://HOST:PORT, or name the servers in NO_PROXY"
            )
        credentials = unquote(address.auth or "") or None
        manager = functools.partial(
            urllib3.ProxyManager,
            address._replace(auth=None).url,
            proxy_headers=urllib3.make_headers(proxy_basic_auth=credentials),
        )
    return manager(
        num_pools=_HOSTS,
        maxsize=CONNECTIONS_PER_HOST,
        block=True,
        timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
        retries=urllib3.Retry(
            total=_MAX_REDIRECTS,
            connect=0,
            read=0,
            status=0,
            other=0,
            redirect=_MAX_REDIRECTS,
            # `_request` waits for the time in the header Retry-After
            respect_retry_after_header=False,
        ),
    )
