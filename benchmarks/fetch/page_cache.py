"""Evicts files from the page cache, loads files into it, and counts cached pages. Linux only."""

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
"""A run is cold if at most this fraction of the subject's pages is in the page cache."""
WARM = 0.99
"""A run is warm if at least this fraction of the subject's pages is in the page cache."""
_PAGE = mmap.PAGESIZE
_CACHESTAT = 451  # cachestat(2), Linux 6.5; the same number on every architecture but alpha
_ATTEMPTS = 3
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently"))


def evict(files: Iterable[Path]) -> float:
    """Evict `files` from the page cache. Return the fraction of pages that could not be evicted."""
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
    """Read `files` into the page cache. Return the fraction of pages that are then cached."""
    paths = list(files)
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return resident(paths)


def resident(files: Iterable[Path]) -> float:
    """Return the fraction of the pages of `files` that are in the page cache."""
    resident_pages = pages = 0
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pages += -(-size // _PAGE)
            counted = resident_by_cachestat(file.fileno())
            resident_pages += resident_by_mincore(file.fileno()) if counted is None else counted
    return resident_pages / pages if pages else 0.0


def resident_by_cachestat(fd: int) -> int | None:
    """Return the number of cached pages of an open file; None if the kernel does not support cachestat(2)."""
    whole_file, stat = _Range(0, 0), _Stat()
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(whole_file), ctypes.byref(stat), 0):
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return None
        raise OSError(code, os.strerror(code))
    return int(stat.cache)


def resident_by_mincore(fd: int) -> int:
    """Return the number of cached pages of an open file."""
    # Since Linux 5.2, the caller must own the file or have write access.
    size = os.fstat(fd).st_size
    if not size:
        return 0
    flags = np.zeros(-(-size // _PAGE), dtype=np.uint8)
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = _LIBC.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data))
        del view  # the mapping cannot be closed while a view exists
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
