"""What the page cache holds of a file, and how much it could hold."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.files import ShardFile
from storage_formats.reading.syscalls import system_call

_CACHESTAT = 451  # Linux 6.5, the same number on every architecture
_Words2 = ctypes.c_uint64 * 2
_Words5 = ctypes.c_uint64 * 5


def resident_share(file: ShardFile, start: int, stop: int) -> float | None:
    """Share of the pages of bytes [start, stop) that are in the page cache, or on their way into it.

    None where the kernel cannot tell, or will not tell this user: of a file that another owns.
    """
    start -= start % mmap.PAGESIZE
    pages = -(-(stop - start) // mmap.PAGESIZE)
    if sys.platform != "linux":
        return None
    try:
        if _has_cachestat():
            return _cachestat(file.fd, start, stop - start) / pages
        found = _mincore(file, start, pages)
        return None if found is None else float(found.mean())
    except OSError:  # of a file that another user owns, or on a file system without a cache of its own
        return None


def resident_records(file: ShardFile, record_bytes: int) -> NDArray[np.bool_]:
    """Which records of a file are in the page cache with all their pages, [length of the file div record_bytes]."""
    count = file.size // record_bytes
    if sys.platform != "linux":
        return np.zeros(count, dtype=np.bool_)
    found = _mincore(file, 0, -(-file.size // mmap.PAGESIZE))
    if found is None:
        return np.zeros(count, dtype=np.bool_)
    missing_before = np.concatenate([[0], np.cumsum(~found)])
    starts = np.arange(count) * record_bytes
    first, last = starts // mmap.PAGESIZE, (starts + record_bytes - 1) // mmap.PAGESIZE
    whole: NDArray[np.bool_] = missing_before[last + 1] == missing_before[first]
    return whole


def _cachestat(fd: int, start: int, length: int) -> int:
    extent = _Words2(start, length)
    counts = _Words5()  # in the cache, dirty, being written, evicted, recently evicted
    system_call(_CACHESTAT, fd, ctypes.addressof(extent), ctypes.addressof(counts), 0)
    return counts[0]


@functools.cache
def _has_cachestat() -> bool:
    with open(__file__, "rb") as file:
        try:
            _cachestat(file.fileno(), 0, 1)
        except OSError as error:
            return error.errno == 1  # EPERM: there, but not for files of other users
    return True


def _mincore(file: ShardFile, start: int, pages: int) -> NDArray[np.bool_] | None:
    """Which pages are in the page cache, [pages]; None where that cannot be told.

    Of files that one could not write to mincore(2) says that all is, so those are not asked about.
    """
    if not os.access(file.path, os.W_OK):
        return None
    found = np.zeros(pages, dtype=np.uint8)
    length, vector = ctypes.c_size_t(pages * mmap.PAGESIZE), ctypes.c_void_p(found.ctypes.data)
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(file.mapped_at() + start), length, vector):
        return None
    return (found & 1).astype(np.bool_)


def cache_room() -> int:
    """Bytes that the page cache could take now without pressing others: half of what is free, of the machine and of
    this process's control group. 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return min([free, *_group_limits()]) // 2
    except (OSError, StopIteration):
        return 0


def _group_limits() -> list[int]:
    """`memory.max` of this process's control group (version 2) and of those above it."""
    group = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    folder = Path("/sys/fs/cgroup") / group.lstrip("/")
    limits = []
    while folder.is_relative_to("/sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError):  # the root has no limit, others may say "max"
            limits.append(int((folder / "memory.max").read_text()))
        folder = folder.parent
    return limits
