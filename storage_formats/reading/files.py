"""A cache of open shard files that limits the number of open files, and a check whether
a file is in the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import struct
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.index_files import open_inside
from storage_formats.format.layout import PAGE_BYTES
from storage_formats.reading.batch import Batch
from storage_formats.reading.queues import system_call
from storage_formats.system_calls import LACKING, advise
from storage_formats.threads import fork_safe_lock, run_threads

# Maximum number of open files of one `ShardFiles` object. Each file may be mapped, and
# Linux allows a process 65,530 memory maps by default (vm.max_map_count).
_MAX_OPEN = 8192
# The `ShardFiles` objects together open at most 1/4 of the files that the process may
# open, because a mapped file has two descriptors.
_SHARE_OF_LIMIT = 4
# Number of ranges in each part that `iter_ranges` yields. The caller checks and
# decodes a part while the disk reads the next parts.
_PART_RANGES = 32
# Number of threads that wait for reads. With `posix_fadvise`, all reads start before
# the first wait, so one thread that waits for one read after the other is enough.
_THREADS = 1 if hasattr(os, "posix_fadvise") else 16
# flag of preadv (Linux 4.14) for reads that never wait for the disk
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
# A file counts as cached if the page cache holds at least this share of its pages.
_CACHED_SHARE = 0.95
# The kernel is asked again whether a file is cached only after this time in seconds.
# For a cached shard of 50 MB, the question takes 0.1 ms, as long as copying 20 records.
TRUSTED_SECONDS = 2.0
# number of the system call cachestat (Linux 6.5), the same on every architecture
_CACHESTAT = 451
# On older kernels, the state of this number of pages stands for that of the whole file.
_SAMPLED_PAGES = 16
# constants of the system call statx
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000


@dataclass
class ShardFile:
    """An open shard file.

    Attributes:
        readers: number of readers that use the file at the moment.
        is_cached: whether the page cache held the file when the kernel was last asked.
            None if the kernel was never asked or does not tell.
        trusted_until: value of `time.monotonic()` from which on the kernel should be
            asked again.
    """

    fd: int
    size: int
    path: str
    readers: int = 0
    is_cached: bool | None = None
    trusted_until: float = 0.0

    def ask(self, now: float) -> None:
        """Ask the kernel whether the page cache holds the file, and store the answer in
        `is_cached`.
        """
        share = self._cached_share()
        self.is_cached = None if share is None else share >= _CACHED_SHARE
        self.trusted_until = now + TRUSTED_SECONDS

    def _cached_share(self) -> float | None:
        """Return the share of the file that is in the page cache, 0 to 1; None if the
        kernel does not tell.

        Linux before 6.5 has no system call for the whole file. There, the share is
        estimated from a sample of 16 pages.
        """
        if sys.platform != "linux" or not self.size:
            return None
        pages = -(-self.size // mmap.PAGESIZE)
        extent = (ctypes.c_uint64 * 2)(0, self.size)
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
                # Before Linux 6.5, mincore(2) answers instead. But if this process may
                # not write to the file, mincore(2) reports every page as cached.
                return None
        sample = np.unique(
            np.linspace(0, pages - 1, _SAMPLED_PAGES, dtype=np.int64)
        ).tolist()
        try:
            mapped = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)
        except OSError:
            # the file system does not support memory maps
            return None
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        states = [page_is_cached(address + page * mmap.PAGESIZE) for page in sample]
        return None if None in states else states.count(True) / len(sample)

    def read_fully(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on, with reads that wait for the
        disk.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.fd, [target[done:]], offset + done)
            except OSError as error:
                raise cannot_read(self.path, error) from error
            if not count:
                raise self.ends_early(offset + done)
            done += count

    def ends_early(self, offset: int) -> CorruptIndexError:
        """Return the error for a file that ends before the byte `offset`."""
        return CorruptIndexError(
            f"{self.path} ends before byte {offset}", remedy="verify"
        )


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def page_is_cached(address: int) -> bool | None:
    """Return whether the page cache holds the page at `address` of a memory map; None
    if the kernel does not tell or the page is not mapped.
    """
    state = ctypes.c_ubyte()
    first = ctypes.c_void_p(address - address % mmap.PAGESIZE)
    length = ctypes.c_size_t(mmap.PAGESIZE)
    if _c_library().mincore(first, length, ctypes.byref(state)):
        return None
    return bool(state.value & 1)


def iter_ranges(
    requests: Sequence[tuple[ShardFile, int, memoryview]],
) -> Iterator[slice]:
    """Read byte ranges of files through the page cache. Yield consecutive parts of
    `requests` as soon as they are read.

    Args:
        requests: (file, byte offset, target) of each range.
    """
    missing = [not each for each in _read_cached(requests)]
    # the advice starts all reads, before the loop below waits for the first part
    for file, offset, target in itertools.compress(requests, missing):
        advise(file.fd, offset, len(target))
    step = _PART_RANGES if any(missing) else max(1, len(requests))
    for start in range(0, len(requests), step):
        part = slice(start, start + step)
        waiting = list(itertools.compress(requests[part], missing[part]))
        run_threads(
            lambda request: request[0].read_fully(*request[1:]),
            waiting,
            min(_THREADS, len(waiting)),
        )
        yield part


def _read_cached(
    requests: Sequence[tuple[ShardFile, int, memoryview]],
) -> Iterator[bool]:
    """Read those ranges that the page cache holds as a whole. Yield, for each of
    `requests`, whether its target was filled.
    """
    for file, offset, target in requests:
        try:
            yield bool(_NOWAIT) and (
                os.preadv(file.fd, [target], offset, _NOWAIT) == len(target)
            )
        except OSError:
            # The bytes are not in the page cache, or the file system does not support
            # the flag. Other errors occur again in `read_fully`.
            yield False


_caches: weakref.WeakSet[ShardFiles] = weakref.WeakSet()
# Another thread may not add a cache while this one lists them.
_listing = fork_safe_lock()


def open_files() -> int:
    """Return the maximum number of files that a `ShardFiles` object keeps open. The
    existing objects share the number of files that the process may open.
    """
    try:
        import resource
    except ImportError:
        # Windows does not have this module
        return 256
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MAX_OPEN
    share = limit // (_SHARE_OF_LIMIT * max(2, len(_caches)))
    return max(8, min(_MAX_OPEN, share))


class ShardFiles:
    """A cache of the open files of one kind, for example the token files of one
    precision. Thread-safe.

    If too many files are open, the cache closes the least recently used file, unless a
    reader uses this file.

    Args:
        root: directory of the index.
        name: relative path of a file with a field for the shard number.
        direct: whether to open files for direct I/O, which bypasses the page cache, if
            the file system supports it.

    Attributes:
        is_direct: whether reads bypass the page cache.
        sector: sector size in bytes; 1 before a file is open. Offsets, lengths and
            memory addresses of direct reads must be multiples of the sector size.
    """

    def __init__(self, root: Path, name: str, *, direct: bool = False) -> None:
        self.is_direct = direct and hasattr(os, "O_DIRECT")
        self.sector = 1
        self._root = root
        self._name = name
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._lock = fork_safe_lock()
        # Closes the files when this object is freed. At the exit of the process, the
        # kernel closes them.
        weakref.finalize(self, _close_all, self._open).atexit = False
        with _listing:
            _caches.add(self)
            caches = list(_caches)
        for cache in caches:
            cache.release({})

    def acquire(self, shards: Iterable[int]) -> dict[int, ShardFile]:
        """Return the open file of each of `shards`, keyed by shard number. The caller
        must pass the result to `release` later.
        """
        files: dict[int, ShardFile] = {}
        try:
            with self._lock:
                for shard in shards:
                    file = self._open.get(shard)
                    if file is None:
                        file = self._open[shard] = self._opened(shard)
                    else:
                        self._open.move_to_end(shard)
                    file.readers += 1
                    files[shard] = file
        except BaseException:
            self.release(files)
            raise
        return files

    def acquire_for(self, batch: Batch, record_bytes: int) -> dict[int, ShardFile]:
        """Return the open files of the shards of `batch`, see `acquire`. Raise
        CorruptIndexError if a file ends before the last record to read from it.
        """
        files = self.acquire([shard for shard, _, _ in batch.shard_spans])
        for shard, _, stop in batch.shard_spans:
            end = (int(batch.positions[stop - 1]) + 1) * record_bytes
            if end > files[shard].size:
                error = files[shard].ends_early(end)
                self.release(files)
                raise error
        return files

    def _opened(self, shard: int) -> ShardFile:
        path = f"{self._root}/{self._name.format(shard)}"
        try:
            try:
                flags = os.O_DIRECT if self.is_direct else 0
                fd = open_inside(self._root, path, flags)
            except OSError as error:
                if error.errno not in LACKING or not self.is_direct:
                    raise
                # the file system does not support direct I/O
                self.is_direct = False
                fd = open_inside(self._root, path)
            if self.is_direct and self.sector == 1:
                self.sector = sector_bytes(path)
            # Without this advice, the kernel would read ahead: `_read_cached` would
            # start reads of many more pages than it asks for.
            advise(fd, advice="RANDOM")
            return ShardFile(fd, os.fstat(fd).st_size, path)
        except OSError as error:
            raise cannot_read(path, error) from error

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
        oldest = itertools.islice(self._open, max(0, len(self._open) - keep))
        for shard in list(oldest):
            if not self._open[shard].readers:
                os.close(self._open.pop(shard).fd)


def _close_all(files: OrderedDict[int, ShardFile]) -> None:
    while files:
        os.close(files.popitem()[1].fd)


def sector_bytes(path: str | Path) -> int:
    """Return the alignment in bytes that direct reads of the file at `path` need."""
    status = ctypes.create_string_buffer(256)
    # glibc has this function from version 2.28 on
    statx = getattr(_c_library(), "statx", None)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, status):
        return PAGE_BYTES
    # the fields stx_dio_mem_align and stx_dio_offset_align of `struct statx`:
    # alignments of memory and of offsets, 0 if unknown
    alignments: tuple[int, int] = struct.unpack_from("=II", status, 0x98)
    return max(alignments) if min(alignments) else PAGE_BYTES
