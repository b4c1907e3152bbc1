"""Random access to files: local files, files on servers, and streams that can only
be read forward.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from edje_index.images.decode import ImageError
from storage_formats.remote.files import read_remote_range, remote_version
from storage_formats.remote.urls import is_url
from storage_formats.system_calls import advise

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""A function `read_at(size, offset)` that returns the bytes [offset, offset + size) of
a file, or fewer if the file ends earlier.
"""

POINTERS = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")
"""Beginnings of the small files that Git LFS and git-annex put in place of files whose
content is not on this machine.
"""

MAX_READ = 1 << 30
"""Largest number of bytes that a parser may read at once, to bound its memory.

The limit is high, because some valid files need large reads: for the list of members of
a zip, and for a Parquet file with all images in one page. If a read goes beyond the end
of the file, only the bytes before the end count towards the limit.
"""

BLOCK_BYTES = 1 << 20
AHEAD_BLOCKS = 8
"""Largest number of blocks of bytes that are requested before they are read."""

KEPT_BLOCKS = 16
"""Largest number of blocks in memory. Blocks that are being requested count, too."""

# largest number of bytes of a pointer
_MAX_POINTER = 1 << 15

KEPT_BYTES = 16 << 20
"""Number of bytes of a stream that stay in memory after they are read, because several
threads read slightly out of order.
"""


class PointerError(OSError):
    """A file is a pointer of Git LFS or git-annex."""


class RangedFile(io.RawIOBase):
    """A read-only, seekable file whose bytes come from a function."""

    def __init__(
        self,
        read_at: ReadAt,
        length: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.length = length
        self._read_at = read_at
        self._close = close
        self._position = 0

    def pread(
        self,
        size: int,
        offset: int,
    ) -> bytes:
        """Return the bytes [offset, offset + size), or fewer if the file ends earlier.

        The position of the file does not change.

        Raises:
            ValueError: the range in the file is larger than `MAX_READ`.
        """
        size = max(0, min(size, self.length - offset))
        if size > MAX_READ:
            raise ValueError(
                f"the file needs a read of {size} bytes at byte {offset}; the limit of"
                f" one read is {MAX_READ} bytes"
            )
        return self._read_at(size, offset) if size else b""

    def read(self, size: int = -1, /) -> bytes:
        # The method of the base class would first allocate `size` bytes, even for a
        # short file.
        data = self.pread(self.length if size < 0 else size, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}
        position = starts[whence] + offset
        if position < 0:
            # Other file objects raise OSError, too. `zipfile` relies on this error,
            # because it seeks to a position before the first byte of a short file.
            raise OSError(f"the position {position} is before the first byte")
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
        only_headers: True if only small parts of the file are read. For a local file,
            this turns off the read-ahead of the operating system, which would read the
            whole file.
    """
    if is_url(path):
        url = os.fsdecode(path)
        version = remote_version(url)
        read_at = functools.partial(read_remote_range, url, version=version)
        blocks = BlockReader(read_at, version.length)
        return RangedFile(blocks.pread, version.length, blocks.close)
    fd, length = open_file(path)
    if only_headers:
        advise(fd, advice="RANDOM")
    return RangedFile(
        functools.partial(read_range, fd), length, functools.partial(os.close, fd)
    )


def open_file(path: bytes) -> tuple[int, int]:
    """Open a local file. Return its descriptor and its length in bytes.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        PointerError: the content of the file is not on this machine.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("the input is not a regular file")
        if status.st_size < _MAX_POINTER and os.pread(fd, 64, 0).startswith(POINTERS):
            raise PointerError(
                errno.ENODATA,
                "the content is not on this machine; get it with 'git lfs pull' or 'git"
                " annex get'",
                path,
            )
    except OSError:
        os.close(fd)
        raise
    return fd, status.st_size


def read_range(
    fd: int,
    size: int,
    offset: int,
) -> bytes:
    """Return the bytes [offset, offset + size) of an open file, or fewer if the
    file ends earlier.
    """
    data = os.pread(fd, size, offset)
    # One call can return fewer bytes: Linux reads at most 2 GiB at once, and network
    # file systems may return less.
    while 0 < len(data) < size:
        part = os.pread(fd, size - len(data), offset + len(data))
        if not part:
            break
        data += part
    return data


class BlockReader:
    """Reads byte ranges of a file in blocks, and keeps the latest blocks in memory.
    Thread-safe.

    Background threads request the blocks. While consecutive blocks are read, the blocks
    after them are requested ahead. If such a request fails, the next reader of the
    block requests it again. A reader raises only the error of a request that it made
    itself.

    Args:
        read_at: function that requests a byte range of the file. Several threads call
            it at the same time.
        length: number of bytes of the file.
    """

    def __init__(
        self,
        read_at: ReadAt,
        length: int,
    ) -> None:
        self._read_at = read_at
        self._length = length
        self._requests = ThreadPoolExecutor(KEPT_BLOCKS, "edje-block")
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()

    def pread(
        self,
        size: int,
        offset: int,
    ) -> bytes:
        """Return the bytes [offset, offset + size), or fewer if the file ends
        earlier.
        """
        stop = min(offset + size, self._length)
        if stop <= offset:
            return b""
        first = offset // BLOCK_BYTES
        last = (stop - 1) // BLOCK_BYTES
        data = b"".join([self._read(number, last) for number in range(first, last + 1)])
        return data[offset - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def close(self) -> None:
        """Request no further blocks. Requests that are running end in the background,
        and their bytes are discarded.
        """
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _read(
        self,
        number: int,
        last: int,
    ) -> bytes:
        """Return block `number`. Afterwards, the caller needs the following blocks, up
        to and including block `last`.
        """
        while True:
            with self._lock:
                earlier = self._blocks.get(number)
                if (
                    earlier is not None
                    and earlier.done()
                    and earlier.exception() is not None
                ):
                    earlier = None
                block = earlier or self._request(number)
                # The number of consecutive blocks in memory before this block. The more
                # there are, the more blocks are requested ahead.
                run = next(
                    run
                    for run in itertools.count()
                    if number - 1 - run not in self._blocks
                )
                ahead = min(max(2 * run, last - number), AHEAD_BLOCKS)
                for each in range(
                    number + 1,
                    min(number + ahead, (self._length - 1) // BLOCK_BYTES) + 1,
                ):
                    if each not in self._blocks:
                        self._request(each)
                self._blocks.move_to_end(number)
                while len(self._blocks) > KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
            try:
                return block.result()
            except Exception:
                # If an earlier request has failed, the loop requests the block again.
                if earlier is None:
                    raise

    def _request(self, number: int) -> Future[bytes]:
        block = self._requests.submit(self._fetch, number)
        self._blocks[number] = block
        return block

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self._length - start)
        data = self._read_at(size, start)
        if len(data) != size:
            raise EOFError(f"the file ends before byte {start + size}")
        return data


class Turns:
    """A lock of streams that can only be read forward. Of the threads that wait for it,
    the thread with the lowest position gets it first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets: list[tuple[int, int]] = []

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        """Hold the lock to read at `position`."""
        ticket = position, threading.get_ident()
        # The ticket is added without the lock, because threads that arrive during a
        # read take part in the choice of the next thread.
        self._tickets.append(ticket)
        try:
            with self._changed:
                self._changed.wait_for(lambda: ticket == min(self._tickets))
                yield
        finally:
            # The ticket is removed even if the thread is interrupted while it waits.
            # Otherwise the ticket would block the other threads.
            with self._changed:
                self._tickets.remove(ticket)
                self._changed.notify_all()


class StreamItem(NamedTuple):
    """A part of a stream: the data at the positions [start, stop). A position is a byte
    of a decompressed tar or a row of a row group.
    """

    start: int
    stop: int
    data: bytes | None


class StreamWindow:
    """The latest items of a stream that can only be read forward. Threads that share a
    window take `Turns`.

    About `KEPT_BYTES` bytes of items are kept. The stream begins again if a requested
    position is before the kept items, or if the last read of the stream raised an
    exception.

    Args:
        begin: function that returns an iterator over the items of the stream, each a
            tuple (number of positions, data). The iterator raises ImageError if the
            stream is damaged.
    """

    def __init__(self, begin: Callable[[], Iterator[tuple[int, bytes | None]]]) -> None:
        self._begin = begin
        # (first position that cannot be read, error)
        self._damage: tuple[int, ImageError] | None = None
        self._restart()

    def _restart(self) -> None:
        self._items = self._begin()
        self._kept: deque[StreamItem] = deque()
        self._kept_bytes = self._first = self._end = 0
        self._is_broken = False

    def read(
        self,
        first: int,
        stop: int,
    ) -> list[StreamItem]:
        """Return the items that overlap with the positions [first, stop), or fewer if
        the stream ends earlier. Raises ImageError if damage makes one of these
        positions unreadable.
        """
        if self._damage is not None and stop > self._damage[0]:
            raise self._damage[1]
        if self._is_broken or first < self._first:
            self._restart()
        while self._end < stop:
            # After an exception, a generator yields no more items, which looks like
            # the end of the stream.
            self._is_broken = True
            try:
                width, data = next(self._items, (0, None))
            except ImageError as damage:
                self._damage = self._end, damage
                raise
            self._is_broken = False
            if not width:
                break
            self._kept.append(StreamItem(self._end, self._end + width, data))
            self._kept_bytes += len(data or b"")
            self._end += width
            while self._kept_bytes > KEPT_BYTES and self._kept[0].stop <= first:
                oldest = self._kept.popleft()
                self._first = oldest.stop
                self._kept_bytes -= len(oldest.data or b"")
        # The search goes backwards, because most reads are near the last item.
        items = itertools.takewhile(
            lambda item: item.stop > first, reversed(self._kept)
        )
        return [item for item in items if item.start < stop][::-1]
