"""A cache of open shard files. It limits the number of open files."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.index_files import open_regular
from storage_formats.reading.base import Batch, Ints
from storage_formats.reading.syscalls import sector_bytes

_MAX_OPEN = 256
_SHARE_OF_LIMIT = 8  # an evaluation has six `ShardFiles`: three precisions, each cached and direct


@dataclass
class ShardFile:
    """An open shard file.

    Attributes:
        fd: file descriptor.
        size: length in bytes.
        path: path of the file.
        readers: number of readers that use the file now.
        resident: bool [records], which records were in the page cache at the last check. None before the first check.
        resident_at: `time.monotonic()` at the last check.
    """

    fd: int
    size: int
    path: Path
    readers: int = 0
    resident: NDArray[np.bool_] | None = field(default=None, repr=False)
    resident_at: float = 0.0
    _map: mmap.mmap | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def mapped_at(self) -> int:
        """Return the memory address at which the file is mapped. The first call maps the file.

        Call this method right before each read. A read beyond the end of a shortened file kills the process (SIGBUS).

        Raises:
            CorruptIndexError: the file has become shorter since it was opened.
        """
        size = os.fstat(self.fd).st_size
        if size < self.size:
            raise CorruptIndexError(
                f"the token file {self.path} was shortened from {self.size} to {size} bytes while the file was "
                "open; run 'edje-index verify'"
            )
        with self._lock:
            if self._map is None:
                self._map = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)
            return int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        self._map = None
        os.close(self.fd)


@functools.cache
def open_files() -> int:
    """Return the maximum number of files that a `ShardFiles` object keeps open."""
    try:
        import resource
    except ImportError:  # not on Windows
        return _MAX_OPEN
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_OPEN if limit == resource.RLIM_INFINITY else max(8, min(_MAX_OPEN, limit // _SHARE_OF_LIMIT))


class ShardFiles:
    """A cache of the open shard files of one precision. Thread-safe.

    If too many files are open, the cache closes the least recently used file. It never closes a file that a reader
    uses.

    Args:
        path: function that takes a shard number and returns the path of the file. It may raise OSError.
        record_bytes: length of a record in bytes.
        direct: whether to open files for direct I/O, which bypasses the page cache, if the file system supports it.

    Attributes:
        sector: sector size in bytes; 1 before a file is open. Offsets, lengths and memory addresses of direct reads
            must be multiples of the sector size.
    """

    def __init__(self, path: Callable[[int], Path], record_bytes: int, *, direct: bool = False) -> None:
        self.record_bytes = record_bytes
        self._path = path
        self._direct = getattr(os, "O_DIRECT", 0) if direct else 0
        self.sector = 1
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open).atexit = False

    @property
    def past_cache(self) -> bool:
        """Return True if reads bypass the page cache."""
        return bool(self._direct)

    def acquire(self, batch: Batch) -> dict[int, ShardFile]:
        """Return the open files of a batch, keyed by shard number. The caller must pass the result to `release` later.

        Raises:
            CorruptIndexError: a file is missing or too short.
        """
        files: dict[int, ShardFile] = {}
        try:
            for shard, _, stop in batch.shard_spans:
                files[shard] = self._get(shard)
                position = int(batch.positions[stop - 1])
                if (position + 1) * self.record_bytes > files[shard].size:
                    raise ends_early(files[shard], position)
        except BaseException:
            self.release(files)
            raise
        return files

    def peek(self, shard: int) -> ShardFile | None:
        """Return the file of a shard, or None if the file is not open.

        Do not read from the file, because another thread may close it at any time.
        """
        return self._open.get(shard)

    def release(self, files: dict[int, ShardFile]) -> None:
        """Release the files that `acquire` returned, so that they can be closed."""
        with self._lock:
            for file in files.values():
                file.readers -= 1
            self._evict(open_files())

    def close(self) -> None:
        """Close all files that no reader uses. A later read opens them again."""
        with self._lock:
            self._evict(0)

    def _get(self, shard: int) -> ShardFile:
        with self._lock:
            file = self._open.get(shard)
            if file is None:
                file = self._open[shard] = self._open_shard(shard)
            self._open.move_to_end(shard)
            file.readers += 1
        return file

    def _open_shard(self, shard: int) -> ShardFile:
        try:
            path = self._path(shard)
            fd = self._open_direct(path) if self._direct else open_regular(path)
            return ShardFile(fd, os.fstat(fd).st_size, path)
        except OSError as error:
            raise cannot_read(error.filename or f"the token file of shard {shard}", error) from error

    def _open_direct(self, path: Path) -> int:
        try:
            fd = open_regular(path, self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = 0  # this file system has no direct I/O
            return open_regular(path)
        if self.sector == 1:
            self.sector = sector_bytes(path)
        return fd

    def _evict(self, keep: int) -> None:
        for shard in list(self._open)[: max(0, len(self._open) - keep)]:
            if not self._open[shard].readers:
                self._open.pop(shard).close()


def _close_all(files: OrderedDict[int, ShardFile]) -> None:
    while files:
        files.popitem()[1].close()


def descriptors(files: dict[int, ShardFile], batch: Batch) -> Ints:
    """Return the file descriptor of each record of `batch`, int64 [n]."""
    return batch.per_record([files[shard].fd for shard, _, _ in batch.shard_spans])


def ends_early(file: ShardFile, position: int) -> CorruptIndexError:
    """Return a CorruptIndexError for a shard file that ends before the record at `position`."""
    return CorruptIndexError(f"{file.path} ends before the record at position {position}; run 'edje-index verify'")
