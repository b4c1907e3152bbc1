"""A cache of open shard files, which limits the number of open files, and the state
of the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import struct
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Codec
from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.index_files import check_inside, open_regular
from storage_formats.format.layout import PAGE_BYTES, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.batch import Batch
from storage_formats.reading.queues import system_call
from storage_formats.system_calls import LACKING

_MAX_OPEN = 256
# an evaluation has six `ShardFiles`: three precisions, each cached and direct
_SHARE_OF_LIMIT = 8
_CACHED_SHARE = 0.95
# asking for a cached shard of 50 MB takes 0.1 ms, as much as copying 20 records
TRUSTED_SECONDS = 2.0
# Linux 6.5, the same number on every architecture
_CACHESTAT = 451
_SAMPLED_PAGES = 16
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000


@dataclass(frozen=True)
class TokenFiles:
    """The names of the token files and checksum files of one precision of an index."""

    index: CommittedIndex
    codec: Codec

    @functools.cached_property
    def _layout(self) -> Layout:
        return Layout(self.index.root)

    def path(self, shard: int) -> Path:
        """Return the path of a token file. Raise OSError if it is outside the index."""
        return check_inside(self.index.root, self._path(shard))

    def key(self, shard: int) -> str:
        """Return the key of a token object."""
        return self._layout.relative(self._path(shard))

    def location(self, shard: int) -> Path | str:
        """Return the path or the URL of a token file, for messages."""
        remote = self.index.remote
        return self._path(shard) if remote is None else remote.url_of(self.key(shard))

    def checksums(self, shard: int) -> Path:
        """Return the path of a checksum file."""
        return self._layout.checksums(self.codec.name, shard)

    def _path(self, shard: int) -> Path:
        ndim = len(self.codec.record_shape)
        return self._layout.token_shard(self.codec.name, shard, ndim)


@dataclass
class ShardFile:
    """An open shard file.

    Attributes:
        readers: number of readers that use the file now.
        is_cached: whether the page cache had the file when the kernel was asked. None
            if the kernel does not tell.
        trusted_until: `time.monotonic()` until which `is_cached` is trusted.
    """

    fd: int
    size: int
    path: Path
    readers: int = 0
    is_cached: bool | None = None
    trusted_until: float = 0.0
    _map: NDArray[np.uint8] | None = field(default=None, repr=False)
    _address: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def mapped_at(self) -> int:
        """Return the memory address at which the file is mapped. The first call maps
        the file.

        Call this method right before each read. A read beyond the end of a shortened
        file kills the process (SIGBUS).
        """
        size = os.fstat(self.fd).st_size
        if size < self.size:
            raise CorruptIndexError(
                f"the token file {self.path} was shortened from {self.size} to {size}"
                " bytes while the file was open",
                remedy="verify",
            )
        with self._lock:
            if self._map is None:
                self._map = np.frombuffer(
                    mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ), dtype=np.uint8
                )
                self._address = self._map.ctypes.data
            return self._address

    def ask(self, now: float) -> None:
        """Ask the kernel whether the page cache has the file."""
        share = self.cached_share(0, self.size)
        self.is_cached = None if share is None else share >= _CACHED_SHARE
        self.trusted_until = now + TRUSTED_SECONDS

    def cached_share(self, start: int, stop: int) -> float | None:
        """Return the share of the bytes [start, stop) in the page cache, 0 to 1; None
        if the kernel does not tell.

        Kernels before 6.5 are asked for a sample of the pages.
        """
        if sys.platform != "linux" or stop <= start:
            return None
        first = start // mmap.PAGESIZE
        pages = -(-stop // mmap.PAGESIZE) - first
        extent = (ctypes.c_uint64 * 2)(start, stop - start)
        counts = (ctypes.c_uint64 * 5)()
        try:
            system_call(
                _CACHESTAT,
                self.fd,
                ctypes.addressof(extent),
                ctypes.addressof(counts),
                0,
            )
            return counts[0] / pages
        except OSError as error:
            if error.errno != errno.ENOSYS or not os.access(self.path, os.W_OK):
                # mincore(2) reports the pages of other users' files as cached
                return None
        sample = np.unique(
            np.linspace(first, first + pages - 1, _SAMPLED_PAGES, dtype=np.int64)
        ).tolist()
        state = ctypes.c_ubyte()
        try:
            address = self.mapped_at()
        except OSError:
            # a file system without memory maps
            return None
        cached = 0
        for page in sample:
            at = ctypes.c_void_p(address + page * mmap.PAGESIZE)
            if ctypes.CDLL(None).mincore(
                at, ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(state)
            ):
                return None
            cached += state.value & 1
        return cached / len(sample)

    def read_fully(
        self, fd: int, position: int, target: memoryview, record_bytes: int
    ) -> None:
        """Read the records from `position` on with blocking reads of the descriptor
        `fd` until `target` is full.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(fd, [target[done:]], position * record_bytes + done)
            except OSError as error:
                raise cannot_read(self.path, error) from error
            if not count:
                raise self.ends_early(position + done // record_bytes)
            done += count

    def ends_early(self, position: int) -> CorruptIndexError:
        """Return the error for a file that ends before the record at `position`."""
        return CorruptIndexError(
            f"{self.path} ends before the record at position {position}",
            remedy="verify",
        )

    def close(self) -> None:
        self._map = None
        os.close(self.fd)


@functools.cache
def open_files() -> int:
    """Return the maximum number of files that a `ShardFiles` object keeps open."""
    try:
        import resource
    except ImportError:
        # not on Windows
        return _MAX_OPEN
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        _MAX_OPEN
        if limit == resource.RLIM_INFINITY
        else max(8, min(_MAX_OPEN, limit // _SHARE_OF_LIMIT))
    )


class ShardFiles:
    """A cache of the open shard files of one precision. Thread-safe.

    If too many files are open, the cache closes the least recently used file. It never
    closes a file that a reader uses.

    Args:
        path: function that takes a shard number and returns the path of the file. It
            may raise OSError.
        direct: whether to open files for direct I/O, which bypasses the page cache, if
            the file system supports it.

    Attributes:
        is_direct: whether reads bypass the page cache.
        sector: sector size in bytes; 1 before a file is open. Offsets, lengths and
            memory addresses of direct reads must be multiples of the sector size.
    """

    def __init__(
        self, path: Callable[[int], Path], record_bytes: int, *, direct: bool = False
    ) -> None:
        self.record_bytes = record_bytes
        self.is_direct = direct and hasattr(os, "O_DIRECT")
        self.sector = 1
        self._path = path
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open).atexit = False

    def get(self, shard: int) -> ShardFile:
        """Return the open file of a shard. The caller must pass it to `release`
        later.
        """
        with self._lock:
            file = self._open.get(shard)
            if file is None:
                try:
                    path = self._path(shard)
                    try:
                        fd = open_regular(path, os.O_DIRECT if self.is_direct else 0)
                    except OSError as error:
                        if error.errno not in LACKING or not self.is_direct:
                            raise
                        # this file system has no direct I/O
                        self.is_direct = False
                        fd = open_regular(path)
                    if self.is_direct and self.sector == 1:
                        self.sector = sector_bytes(path)
                    file = self._open[shard] = ShardFile(fd, os.fstat(fd).st_size, path)
                except OSError as error:
                    raise cannot_read(
                        error.filename or f"the token file of shard {shard}", error
                    ) from error
            self._open.move_to_end(shard)
            file.readers += 1
        return file

    def acquire(self, batch: Batch) -> dict[int, ShardFile]:
        """Return the open files of a batch by shard number. The caller must pass
        the result to `release` later.
        """
        files: dict[int, ShardFile] = {}
        try:
            for shard, _, stop in batch.shard_spans:
                files[shard] = self.get(shard)
                position = int(batch.positions[stop - 1])
                if (position + 1) * self.record_bytes > files[shard].size:
                    raise files[shard].ends_early(position)
        except BaseException:
            self.release(files)
            raise
        return files

    def peek(self, shard: int) -> ShardFile | None:
        """Return the file of a shard, or None if it is not open. Another thread may
        close the file at any time.
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

    def _evict(self, keep: int) -> None:
        for shard in list(self._open)[: max(0, len(self._open) - keep)]:
            if not self._open[shard].readers:
                self._open.pop(shard).close()


def _close_all(files: OrderedDict[int, ShardFile]) -> None:
    while files:
        files.popitem()[1].close()


def sector_bytes(path: Path) -> int:
    """Return the alignment in bytes that direct reads of the file at `path` need."""
    status = ctypes.create_string_buffer(256)
    # glibc 2.28
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, status):
        return PAGE_BYTES
    # of memory, of offsets; 0 if unknown
    alignments: tuple[int, int] = struct.unpack_from("=II", status, 0x98)
    return max(alignments) if min(alignments) else PAGE_BYTES
