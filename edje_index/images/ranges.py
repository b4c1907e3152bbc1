"""Seekable files that are read by byte ranges."""

from __future__ import annotations

import functools
import io
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from edje_index.images.remote.urls import is_remote, scheme_of
from storage_formats.format.object_store import STORE_SCHEMES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""A function `read_at(size, offset)` that returns the bytes of a range, or fewer if the file ends earlier."""

MAX_READ = 1 << 30
"""Largest number of bytes that a parser may read at once, to bound its memory.

Valid files need large reads: the list of members of a zip, and a column of images in one page of a Parquet file. The
limit applies after the size is cut to the end of the file, so a damaged size costs at most as much as a valid one.
"""


class OversizedReadError(ValueError):
    """A parser tried to read more than `MAX_READ` bytes at once."""


class RangedFile(io.RawIOBase):
    """A read-only, seekable file whose bytes come from a function.

    Args:
        read_at: function that reads a byte range.
        length: number of bytes of the file.
        close: called once, when the file is closed.
    """

    def __init__(self, read_at: ReadAt, length: int, close: Callable[[], None] = lambda: None) -> None:
        self.length = length
        self._read_at = read_at
        self._close = close
        self._position = 0

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes [offset, offset + size), or fewer if the file ends earlier.

        The position of the file does not change.

        Raises:
            OversizedReadError: the range in the file is larger than `MAX_READ`.
            OSError: the file cannot be read.
        """
        size = max(0, min(size, self.length - offset))
        if size > MAX_READ:
            raise OversizedReadError(
                f"the file needs a read of {size} bytes at byte {offset}; the limit of one read is {MAX_READ} bytes"
            )
        return self._read_at(size, offset) if size else b""

    def read(self, size: int = -1, /) -> bytes:
        # The method of the base class would first take memory for `size` bytes.
        data = self.pread(self.length if size < 0 else size, self._position)
        self._position += len(data)
        return data

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.pread(len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        if position < 0:
            raise ValueError(f"the position {position} is before the first byte")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._close()


def open_ranged(path: bytes) -> RangedFile:
    """Open a file to read byte ranges.

    Args:
        path: path or URL.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        MissingExtraError: the library that reads the URL is not installed.
    """
    if is_remote(path):
        return _open_remote(os.fsdecode(path))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return RangedFile(lambda size, offset: read_range(fd, size, offset), status.st_size, lambda: os.close(fd))


def _open_remote(url: str) -> RangedFile:
    from edje_index.images.remote.access import read_remote_range, remote_version
    from edje_index.images.remote.blocks import BlockReader

    version = remote_version(url)
    # A web server may stop answering. The library for object stores could crash in a daemon thread at the end.
    blocks = BlockReader(
        functools.partial(read_remote_range, url, version=version),
        version.length,
        daemon=scheme_of(url) not in STORE_SCHEMES,
    )
    return RangedFile(blocks.pread, version.length, blocks.close)


def read_range(fd: int, size: int, offset: int) -> bytes:
    """Return the bytes [offset, offset + size) of an open file, or fewer if the file ends earlier."""
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size:
        part = os.pread(fd, size - len(data), offset + len(data))
        if not part:
            break
        data += part
    return data
