"""Reads files in object stores, on web servers and on the Hugging Face Hub, by their URLs.

URLs of the Hub are `hf://datasets/OWNER/NAME[@REVISION]/PATH`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from edje_index.images import web
from edje_index.images.transient import retry
from edje_index.images.urls import HUB_SCHEME, ChangedFileError, FileVersion, UnreachableError, scheme_of
from storage_formats.extras import name_missing_extra
from storage_formats.format.object_store import STORE_SCHEMES, ObjectChangedError, ObjectFolder, ObjectStoreError

DEFAULT_ENDPOINT = "https://huggingface.co"
_BUCKETS = 32  # whose connections stay open
_MAX_PAGE_BYTES = 64 << 20
_HUB_KINDS = ("datasets", "spaces")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')


def require_libraries(url: str) -> None:
    """Raise MissingExtraError if the library that reads `url` is not installed."""
    with name_missing_extra("remote"):
        importlib.import_module("obstore" if scheme_of(url) in STORE_SCHEMES else "urllib3")


def read_remote(url: str, max_bytes: int) -> bytes:
    """Return a whole file.

    Raises:
        FileNotFoundError, PermissionError: there is no such file, or the server refuses the request.
        UnreachableError: the server does not respond.
        OSError: the file is longer than `max_bytes` (EFBIG).
        MissingExtraError: a library is not installed.
        ValueError: the URL is not valid.
    """
    if scheme_of(url) not in STORE_SCHEMES:
        return web.request(*_web_request(url), max_bytes).body
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
                return bytes(bucket.read_range(key, offset, offset + size, etag=version.etag))
        address, headers = _web_request(url)
        answer = web.request(address, {**headers, "Range": f"bytes={offset}-{offset + size - 1}"}, size)
    except EOFError as error:  # the file ends before the range
        raise ChangedFileError(url) from error
    etag = answer.headers.get("ETag")
    if answer.total not in (None, version.length) or (None not in (etag, version.etag) and etag != version.etag):
        raise ChangedFileError(url)
    if len(answer.body) != size:
        raise UnreachableError(f"the server sent {len(answer.body)} of {size} bytes", url)
    return answer.body


def remote_version(url: str) -> FileVersion:
    """Return the length of a file, and what identifies its contents. Raises as `read_remote`."""
    if scheme_of(url) in STORE_SCHEMES:
        with _object(url) as (bucket, key):
            info = bucket.info(key)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", url)
        return FileVersion(info.size, info.etag)
    address, headers = _web_request(url)
    try:
        answer = web.request(address, {**headers, "Range": "bytes=0-0"}, 1)
    except EOFError:  # an empty file has no first byte
        return FileVersion(0)
    if answer.total is None:
        raise OSError(errno.EOPNOTSUPP, web.NO_RANGES, url)
    return FileVersion(answer.total, answer.headers.get("ETag"))


def list_remote_folder(url: str) -> tuple[dict[str, int], list[str]] | None:
    """Return the contents of a directory; None if the server lists no directories.

    Returns:
        (sizes of the files by name, names of the subdirectories).

    Raises:
        OSError, ValueError, MissingExtraError: see `read_remote`.
        TransientInputError: an object store does not respond.
    """
    if scheme_of(url) in STORE_SCHEMES:
        return _list_objects(url)
    return _list_hub(url) if scheme_of(url) == HUB_SCHEME else None


def _web_request(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL of the content of a file, and the headers of a request for it."""
    if scheme_of(url) != HUB_SCHEME:
        return url, {}
    endpoint, headers, repository, revision, path = _hub(url)
    return f"{endpoint}/{repository}/resolve/{revision}/{path}", headers


def _hub(url: str) -> tuple[str, dict[str, str], str, str, str]:
    """Return (server, headers, repository such as "datasets/OWNER/NAME", revision, path), encoded for a URL."""
    parts = url.partition("://")[2].strip("/").split("/")
    length = 3 if parts[0] in _HUB_KINDS else 2
    if len(parts) < length or not all(parts):
        raise ValueError(f"{url} names no repository; give a URL such as hf://datasets/OWNER/NAME/data")
    repository, _, revision = "/".join(parts[:length]).partition("@")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
    return endpoint, headers, repository, quote(revision or "main", safe=""), quote("/".join(parts[length:]))


def _list_hub(url: str) -> tuple[dict[str, int], list[str]]:
    endpoint, headers, repository, revision, path = _hub(url)
    kind = "" if repository.split("/")[0] in _HUB_KINDS else "models/"
    page: str | None = f"{endpoint}/api/{kind}{repository}/tree/{revision}/{path}".rstrip("/")
    files: dict[str, int] = {}
    directories: list[str] = []
    while page is not None:
        answer = web.request(page, headers, _MAX_PAGE_BYTES)
        try:
            entries = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise OSError(errno.EPROTO, f"the answer of {page} is not JSON: {error}") from error
        for entry in entries:
            name = str(entry["path"]).rpartition("/")[2]
            if entry["type"] == "directory":
                directories.append(name)
            else:
                files[name] = int(entry["size"])
        following = _NEXT.search(answer.headers.get("Link", ""))
        page = following[1] if following else None
    return files, directories


def _list_objects(url: str) -> tuple[dict[str, int], list[str]]:
    import obstore
    from obstore.exceptions import BaseError

    def listed() -> Any:
        with _object(url.rstrip("/")) as (bucket, key):
            try:
                return obstore.list_with_delimiter(bucket.store, key or None)
            except BaseError as error:
                raise UnreachableError(str(error).partition("\n")[0].partition(": <?xml")[0], url) from error

    result = retry(listed, url)  # obstore does not repeat a list that is cut off
    files = {each["path"].rpartition("/")[2]: int(each["size"]) for each in result["objects"]}
    return files, [prefix.rstrip("/").rpartition("/")[2] for prefix in result["common_prefixes"]]


@contextlib.contextmanager
def _object(url: str) -> Iterator[tuple[ObjectFolder, str]]:
    """Yield the bucket in the URL of an object, and the key of the object. Translate the errors of the store."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    try:
        yield _bucket(f"{scheme}://{bucket}"), key
    except ObjectChangedError as error:
        raise ChangedFileError(url) from error
    except ObjectStoreError as error:
        raise UnreachableError(str(error), url) from error


_bucket = functools.lru_cache(_BUCKETS)(ObjectFolder.open)
