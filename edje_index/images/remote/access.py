"""Reads remote files by their URLs, whatever the kind of the server."""

from __future__ import annotations

import importlib

from edje_index.images.remote import hub, web
from edje_index.images.remote.errors import ChangedFileError
from edje_index.images.remote.listing import Folder
from edje_index.images.remote.urls import HUB_SCHEME, scheme_of
from edje_index.images.remote.versions import FileVersion
from storage_formats.extras import name_missing_extra
from storage_formats.format.object_store import STORE_SCHEMES


def require_libraries(url: str) -> None:
    """Raise MissingExtraError if the library that reads `url` is not installed."""
    with name_missing_extra("remote"):
        importlib.import_module("obstore" if scheme_of(url) in STORE_SCHEMES else "urllib3")


def read_remote(url: str, max_bytes: int) -> bytes:
    """Return a whole file.

    Raises:
        OSError: the file cannot be read. `UnreachableError` and the other errors of `edje_index.images.remote.web` are
            kinds of OSError.
        MissingExtraError: a library is not installed.
        ValueError: the URL is not valid.
    """
    scheme = scheme_of(url)
    if scheme in STORE_SCHEMES:
        from edje_index.images.remote.objects import read_object

        return read_object(url, max_bytes)
    if scheme == HUB_SCHEME:
        return web.read_web(hub.HubFile.parse(url).url, max_bytes, hub.hub_headers())
    return web.read_web(url, max_bytes)


def read_remote_range(url: str, size: int, offset: int, *, version: FileVersion | None = None) -> bytes:
    """Return the bytes [offset, offset + size) of a file.

    Args:
        url: URL of the file.
        size: number of bytes.
        offset: first byte.
        version: version of the file that the range must belong to; None accepts any.

    Raises:
        ChangedFileError: the server has another version of the file.
        EOFError: the file ends before the range, and `version` is None.
        OSError, MissingExtraError, ValueError: see `read_remote`.
    """
    try:
        return _read_range(url, size, offset, version)
    except EOFError as error:
        if version is None:
            raise
        raise ChangedFileError(url) from error


def _read_range(url: str, size: int, offset: int, version: FileVersion | None) -> bytes:
    scheme = scheme_of(url)
    if scheme in STORE_SCHEMES:
        from edje_index.images.remote.objects import read_object_range

        return read_object_range(url, size, offset, version=version)
    if scheme == HUB_SCHEME:
        return web.read_web_range(hub.HubFile.parse(url).url, size, offset, hub.hub_headers(), version=version)
    return web.read_web_range(url, size, offset, version=version)


def remote_version(url: str) -> FileVersion:
    """Return the length of a file, and what identifies its contents. Raises as `read_remote`."""
    scheme = scheme_of(url)
    if scheme in STORE_SCHEMES:
        from edje_index.images.remote.objects import object_version

        return object_version(url)
    if scheme == HUB_SCHEME:
        return web.web_version(hub.HubFile.parse(url).url, hub.hub_headers())
    return web.web_version(url)


def list_remote_folder(url: str) -> Folder | None:
    """Return the contents of a directory; None if the server lists no directories.

    Raises:
        OSError, ValueError, MissingExtraError: see `read_remote`.
        TransientInputError: an object store does not respond.
    """
    scheme = scheme_of(url)
    if scheme in STORE_SCHEMES:
        from edje_index.images.remote.objects import list_object_folder

        return list_object_folder(url)
    return hub.list_hub_folder(url) if scheme == HUB_SCHEME else None
