"""Distinguishes URLs from paths, and removes passwords from URLs. Defines the
errors and versions of remote files.
"""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from storage_formats.remote.urls import INDEX_SCHEMES

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_REMOTE = re.compile(f"(?:{'|'.join(INDEX_SCHEMES)})://".encode(), re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/?#\s]*@")


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    match = _SCHEME.match(text)
    return None if match is None else match[1].lower()


def is_remote(path: bytes) -> bool:
    """Return True if `path` is a URL that this package reads."""
    return _REMOTE.match(path) is not None


def has_credentials(url: str) -> bool:
    """Return True if `url` contains a user name or a password, as
    `https://user:password@host` does.
    """
    return scheme_of(url) is not None and without_credentials(url) != url


def without_credentials(text: str) -> str:
    """Return `text`, with "..." in place of the user names and passwords of its
    URLs.
    """
    return _USER.sub("...@", text)


class FileVersion(NamedTuple):
    """What a server says about a file, so that ranges of two versions are never
    combined.

    Attributes:
        etag: identifier of the contents; None if the server sends none.
        modified: time of the last modification, in the words of the server; None if the
            server sends none.
    """

    length: int
    etag: str | None = None
    modified: str | None = None


class UnreachableError(OSError):
    """A server does not respond, or cannot respond now. A later attempt may succeed."""

    def __init__(self, reason: str, url: str) -> None:
        super().__init__(errno.EHOSTUNREACH, reason, url)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.strerror, self.filename)


class ChangedFileError(OSError):
    """A file on a server has changed while it was read."""

    def __init__(self, url: str) -> None:
        super().__init__(
            errno.EPROTO, "the file on the server has changed while it was read", url
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.filename,)
