"""Reads objects of S3, Google Cloud Storage and Azure."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator
from typing import Any

from edje_index.images.remote.errors import ChangedFileError, OversizedFileError, UnreachableError
from edje_index.images.remote.listing import Folder, RemoteFile
from edje_index.images.remote.versions import FileVersion
from edje_index.images.transient import retry
from storage_formats.format.object_store import ObjectChangedError, ObjectFolder, ObjectStoreError

_BUCKETS = 32  # whose connections stay open


def read_object(url: str, max_bytes: int) -> bytes:
    """Return a whole object.

    Raises:
        FileNotFoundError: there is no such object.
        UnreachableError: the store refuses the request or does not respond.
        OversizedFileError: the object is longer than `max_bytes`.
    """
    bucket, key = _located(url)
    try:
        with _translated(url):
            return bucket.read(key, max_bytes).data
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise OversizedFileError(max_bytes + 1, max_bytes, url) from error
        raise


def read_object_range(url: str, size: int, offset: int, *, version: FileVersion | None = None) -> bytes:
    """Return the bytes [offset, offset + size) of an object.

    Args:
        url: URL of the object.
        size: number of bytes.
        offset: first byte.
        version: version of the object that the range must belong to; None accepts any.

    Raises:
        ChangedFileError: the store has another version.
        EOFError: the object ends before the range.
        OSError: see `read_object`.
    """
    bucket, key = _located(url)
    with _translated(url):
        try:
            return bytes(bucket.read_range(key, offset, offset + size, etag=version.etag if version else None))
        except ObjectChangedError as error:
            raise ChangedFileError(url) from error


def object_version(url: str) -> FileVersion:
    """Return the length of an object, and its ETag. Raises as `read_object`."""
    bucket, key = _located(url)
    with _translated(url):
        info = bucket.info(key)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url)
    return FileVersion(info.size, info.etag)


def list_object_folder(url: str) -> Folder:
    """Return the objects and directories directly below a URL.

    Raises:
        TransientInputError: the store refuses the request or does not respond.
    """
    import obstore
    from obstore.exceptions import BaseError

    bucket, key = _located(url.rstrip("/"))

    def listed() -> Any:
        try:
            return obstore.list_with_delimiter(bucket.store, key or None)
        except BaseError as error:
            raise UnreachableError(str(error).partition("\n")[0].partition(": <?xml")[0], url) from error

    result = retry(listed, url)  # obstore does not repeat a list that is cut off
    files = [RemoteFile(each["path"].rpartition("/")[2], each["size"]) for each in result["objects"]]
    return Folder(files, [prefix.rstrip("/").rpartition("/")[2] for prefix in result["common_prefixes"]])


def _located(url: str) -> tuple[ObjectFolder, str]:
    """Return the bucket in the URL of an object, and the key of the object."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return _bucket(f"{scheme}://{bucket}"), key


@functools.lru_cache(_BUCKETS)
def _bucket(url: str) -> ObjectFolder:
    return ObjectFolder.open(url)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except ObjectStoreError as error:
        raise UnreachableError(str(error), url) from error
