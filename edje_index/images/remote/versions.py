"""Identifies the version of a remote file, so that ranges of two versions are never combined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileVersion:
    """What a server says about a file.

    Attributes:
        length: number of bytes.
        etag: identifier of the contents; None if the server sends none.
    """

    length: int
    etag: str | None = None

    def differs(self, length: int | None, etag: str | None) -> bool:
        """Return True if a later response names another length or another ETag. None is unknown."""
        return length not in (None, self.length) or (None not in (etag, self.etag) and etag != self.etag)
