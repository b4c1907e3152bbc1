"""Reads objects of S3, Google Cloud Storage and Azure."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator
from typing import Any

from edje_index.images.remote.errors import OversizedFileError, UnreachableError
from edje_index.images.remote.listing import Folder, RemoteFile
from edje_index.images.transient import retry_transient
from storage_formats.format.object_store import ObjectFolder, ObjectStoreError

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


def read_object_range(url: str, size: int, offset: int) -> bytes:
    """Return the bytes [offset, offset + size) of an object.

    Raises:
        EOFError: the object ends before the range.
        OSError: see `read_object`.
    """
    bucket, key = _located(url)
    with _translated(url):
        return bytes(bucket.read_range(key, offset, offset + size))


def object_length(url: str) -> int:
    """Return the number of bytes of an object. Raises as `read_object`."""
    bucket, key = _located(url)
    with _translated(url):
        info = bucket.info(key)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url)
    return info.size


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

    result = retry_transient(listed, url)  # obstore does not repeat a list that is cut off
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
