"""The page cache: throwing files out of it, reading them into it, and asking which of their pages it holds. Linux."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

COLD = 0.01
"""Largest fraction of a subject's pages that may be in the page cache for a run to count as cold."""
WARM = 0.99
"""Smallest fraction for a run to count as warm."""
_PAGE = mmap.PAGESIZE
_CACHESTAT = 451  # cachestat(2), Linux 6.5; one number on every architecture but alpha
_ATTEMPTS = 3
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently"))


def evict(files: Iterable[Path]) -> float:
    """Write back and drop the cached pages of `files`; returns the fraction that is still resident.

    The whole page cache is dropped only where fadvise did not do and the system permits it.
    """
    paths = list(files)
    for attempt in range(_ATTEMPTS):
        for path in paths:
            _drop(path)
        if (left := resident(paths)) <= COLD:
            break
        if attempt and os.access(_DROP_CACHES, os.W_OK):
            os.sync()
            _DROP_CACHES.write_text("1")
        time.sleep(0.2)
    return left


def load(files: Iterable[Path]) -> float:
    """Read `files` into the page cache; returns the fraction that is resident afterwards."""
    paths = list(files)
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return resident(paths)


def resident(files: Iterable[Path]) -> float:
    """Fraction of the pages of `files` that the page cache holds, by cachestat(2), else mincore(2)."""
    held = pages = 0
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pages += -(-size // _PAGE)
            counted = resident_by_cachestat(file.fileno())
            held += resident_by_mincore(file.fileno()) if counted is None else counted
    return held / pages if pages else 0.0


def resident_by_cachestat(fd: int) -> int | None:
    """Pages of an open file in the page cache; None where the kernel has no cachestat(2)."""
    whole, found = _Range(0, 0), _Stat()
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), 0):
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return None
        raise OSError(code, os.strerror(code))
    return int(found.cache)


def resident_by_mincore(fd: int) -> int:
    """Pages of an open file in the page cache. Needs to own the file or be able to write it (Linux 5.2 on)."""
    size = os.fstat(fd).st_size
    if not size:
        return 0
    flags = np.zeros(-(-size // _PAGE), dtype=np.uint8)
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = _LIBC.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data))
        del view  # or the mapping cannot be closed
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int((flags & 1).sum())


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # dirty pages cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
