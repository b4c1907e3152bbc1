"""Seekable files that are read by byte ranges: local files, and files on servers, which are read in blocks."""

from __future__ import annotations

import functools
import io
import os
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
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

BLOCK_BYTES = 1 << 20
REQUEST_BLOCKS = 4
"""Largest number of blocks of one request."""

AHEAD_BLOCKS = 8
"""Largest number of blocks ahead of a reader: two requests, so that one is under way while the other is read."""

KEPT_BLOCKS = 16
"""Largest number of blocks that stay in memory, requested ones included. A block keeps the bytes of its whole request,
so a reader takes a little more than `KEPT_BLOCKS` blocks if it reads forward, and never `REQUEST_BLOCKS` times as much.
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
        data = self.read(len(view))
        view[: len(data)] = data
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


def open_ranged(path: bytes, *, only_headers: bool = False) -> RangedFile:
    """Open a file to read byte ranges.

    Args:
        path: path or URL.
        only_headers: True if small parts of a local file are read. Read-ahead would fetch the whole file.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        MissingExtraError: the library that reads the URL is not installed.
    """
    if is_remote(path):
        from edje_index.images.remote.access import read_remote_range, remote_version

        url = os.fsdecode(path)
        version = remote_version(url)
        # A web server may stop answering. The library for object stores could crash in a daemon thread at the end.
        blocks = BlockReader(
            functools.partial(read_remote_range, url, version=version),
            version.length,
            daemon=scheme_of(url) not in STORE_SCHEMES,
        )
        return RangedFile(blocks.pread, version.length, blocks.close)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    if only_headers and sys.platform == "linux":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return RangedFile(functools.partial(read_range, fd), status.st_size, lambda: os.close(fd))


def read_range(fd: int, size: int, offset: int) -> bytes:
    """Return the bytes [offset, offset + size) of an open file, or fewer if the file ends earlier."""
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size:
        part = os.pread(fd, size - len(data), offset + len(data))
        if not part:
            break
        data += part
    return data


class _Block(Future[memoryview]):
    """A block that is in memory or requested.

    Attributes:
        run: number of consecutive blocks, up to this one, that were read; 0 if this block was not read yet.
    """

    run = 0


class BlockReader:
    """Reads byte ranges of a file in blocks, and keeps the latest blocks in memory. Thread-safe.

    Threads of their own request the blocks. If consecutive blocks are read, the following blocks are requested ahead.
    If a request fails, its blocks are requested again by the next reader, and only an error of its own request is
    raised.

    Args:
        read_at: function that requests a byte range of the file. Threads call it at the same time.
        length: number of bytes of the file.
        daemon: whether the process may end during a request.
    """

    def __init__(self, read_at: ReadAt, length: int, *, daemon: bool = False) -> None:
        self._read_at = read_at
        self._daemon = daemon
        self._length = length
        self._lock = threading.RLock()  # the garbage collector may call `close` in the thread that holds it
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._closed = False

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes [offset, offset + size), or fewer if the file ends earlier.

        Raises:
            Exception: any exception of `read_at`.
        """
        stop = min(offset + size, self._length)
        parts = []
        while offset < stop:
            number, start = divmod(offset, BLOCK_BYTES)
            parts.append(self._read(number, (stop - 1) // BLOCK_BYTES)[start : start + stop - offset])
            offset += len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Forget all blocks and request none ahead. A request that is under way ends by itself; its bytes are lost."""
        with self._lock:
            self._closed = True
            self._blocks.clear()

    def _read(self, number: int, last: int) -> memoryview:
        """Return block `number`. The caller needs the blocks up to `last` next."""
        while True:
            with self._lock:
                is_new = number not in self._blocks
                block = self._request(number, last) if is_new else self._blocks[number]
                if number in self._blocks:
                    self._blocks.move_to_end(number)
                    self._read_ahead(number)
            try:
                return block.result()
            except Exception:
                if is_new:
                    raise

    def _read_ahead(self, number: int) -> None:
        """Note that block `number` is read. If the reads are sequential, request blocks ahead."""
        block, previous = self._blocks[number], self._blocks.get(number - 1)
        if block.run:
            return
        block.run = 1 + (previous.run if previous else 0)
        window = min(2 * (block.run - 1), AHEAD_BLOCKS)
        if number + window // 2 not in self._blocks and not self._closed:
            first = next(each for each in range(number + 1, number + window + 1) if each not in self._blocks)
            if first * BLOCK_BYTES < self._length:
                self._request(first, number + window)

    def _request(self, first: int, last: int) -> _Block:
        """Request block `first`, and the missing blocks after it up to `last`. Return block `first`."""
        blocks: dict[int, _Block] = {}
        for number in range(first, min(last + 1, first + REQUEST_BLOCKS, -(-self._length // BLOCK_BYTES))):
            if number in self._blocks:
                break
            blocks[number] = self._blocks[number] = _Block()
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        fetch = threading.Thread(target=self._fetch, args=(blocks,), name="edje-blocks", daemon=self._daemon)
        try:
            fetch.start()
        except RuntimeError as error:  # the system allows no further thread
            self._drop(blocks, OSError(str(error)))
        return blocks[first]

    def _fetch(self, blocks: dict[int, _Block]) -> None:
        """Request consecutive blocks, and hand them to all threads that wait for them."""
        start = min(blocks) * BLOCK_BYTES
        size = min(len(blocks) * BLOCK_BYTES, self._length - start)
        try:
            data = memoryview(self._read_at(size, start))
            if len(data) != size:
                raise EOFError(f"the file ends before byte {start + size}")
        except BaseException as error:  # also SystemExit, after which no reader may wait for the blocks
            self._drop(blocks, error if isinstance(error, Exception) else OSError(f"the request ended: {error!r}"))
            return
        for position, block in enumerate(blocks.values()):
            block.set_result(data[position * BLOCK_BYTES : (position + 1) * BLOCK_BYTES])

    def _drop(self, blocks: dict[int, _Block], error: Exception) -> None:
        """Forget requested blocks, and raise `error` in the threads that wait for them."""
        with self._lock:
            for number, block in blocks.items():
                if self._blocks.get(number) is block:
                    del self._blocks[number]
        for block in blocks.values():
            block.set_exception(error)
