"""Errors of remote files."""

from __future__ import annotations

import errno


class UnreachableError(OSError):
    """A server does not respond, or cannot respond now. A later attempt may succeed."""

    def __init__(self, reason: str, url: str) -> None:
        super().__init__(errno.EHOSTUNREACH, reason, url)


class NoRangesError(OSError):
    """A server does not answer requests for byte ranges."""

    def __init__(self, url: str) -> None:
        super().__init__(
            errno.EOPNOTSUPP, "the server does not answer requests for byte ranges; download the file", url
        )


class OversizedFileError(OSError):
    """A file is longer than the caller allows."""

    def __init__(self, length: int, max_bytes: int, url: str) -> None:
        super().__init__(errno.EFBIG, f"{length} bytes is over the limit of {max_bytes}", url)


class ChangedFileError(OSError):
    """A file on a server has changed while it was read."""

    def __init__(self, url: str) -> None:
        super().__init__(errno.EPROTO, "the file on the server has changed while it was read", url)
