"""Queries of the page cache: which records are cached, and how much room is left for records."""

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
    """Return the share (0 to 1) of the bytes [start, stop) in the page cache; None if the kernel does not report it."""
    start -= start % mmap.PAGESIZE
    pages = -(-(stop - start) // mmap.PAGESIZE)
    if sys.platform != "linux":
        return None
    try:
        if _has_cachestat():
            return _cachestat(file.fd, start, stop - start) / pages
        resident = _mincore(file, start, pages)
        return None if resident is None else float(resident.mean())
    except OSError:  # another user owns the file, or the file system has no page cache
        return None


def resident_records(file: ShardFile, record_bytes: int) -> NDArray[np.bool_]:
    """Return which records are in the page cache, bool [n]. All are False if the kernel does not report it."""
    count = file.size // record_bytes
    if sys.platform != "linux":
        return np.zeros(count, dtype=np.bool_)
    resident = _mincore(file, 0, -(-file.size // mmap.PAGESIZE))
    if resident is None:
        return np.zeros(count, dtype=np.bool_)
    missing_before = np.concatenate([[0], np.cumsum(~resident)])
    starts = np.arange(count) * record_bytes
    first, last = starts // mmap.PAGESIZE, (starts + record_bytes - 1) // mmap.PAGESIZE
    complete: NDArray[np.bool_] = missing_before[last + 1] == missing_before[first]
    return complete


def _cachestat(fd: int, start: int, length: int) -> int:
    extent = _Words2(start, length)
    counts = _Words5()  # pages in the cache, dirty, being written, evicted, recently evicted
    system_call(_CACHESTAT, fd, ctypes.addressof(extent), ctypes.addressof(counts), 0)
    return counts[0]


@functools.cache
def _has_cachestat() -> bool:
    with open(__file__, "rb") as file:
        try:
            _cachestat(file.fileno(), 0, 1)
        except OSError as error:
            return error.errno == 1  # EPERM: the call exists, but not for files of other users
    return True


def _mincore(file: ShardFile, start: int, pages: int) -> NDArray[np.bool_] | None:
    """Return which pages are in the page cache, bool [pages]; None if the kernel does not report it."""
    # mincore(2) reports all pages of a file as resident if this user cannot write to the file.
    if not os.access(file.path, os.W_OK):
        return None
    flags = np.zeros(pages, dtype=np.uint8)
    length, vector = ctypes.c_size_t(pages * mmap.PAGESIZE), ctypes.c_void_p(flags.ctypes.data)
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(file.mapped_at() + start), length, vector):
        return None
    return (flags & 1).astype(np.bool_)


def cache_room() -> int:
    """Return how many bytes of shards the page cache may take without displacing other data.

    The result is half of the available memory, and at most half of the memory limit of the control group. It is 0 if
    the operating system does not report the available memory.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return min([free, *_group_limits()]) // 2
    except (OSError, StopIteration):
        return 0


def _group_limits() -> list[int]:
    """Return the memory limits in bytes of the control group of this process and of all parent groups."""
    group = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    folder = Path("/sys/fs/cgroup") / group.lstrip("/")
    limits = []
    while folder.is_relative_to("/sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError):  # the root group has no such file; other files may contain "max"
            limits.append(int((folder / "memory.max").read_text()))
        folder = folder.parent
    return limits
