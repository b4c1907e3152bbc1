"""Evicts files from the page cache, and reads counters of the kernel: cached pages,
bytes read, memory. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

COLD = 0.01
"""A run is cold if at most this fraction of the pages of its files is in the page cache
when it starts.
"""
WARM = 0.99
"""A run is warm if at least this fraction of the pages of its files is in the page
cache when it starts.
"""
_ATTEMPTS = 3
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_QUEUE = (
    "logical_block_size",
    "max_sectors_kb",
    "nr_requests",
    "read_ahead_kb",
    "rotational",
)
_LIBC = ctypes.CDLL(None, use_errno=True)


def evict(files: Iterable[Path]) -> float:
    """Evict `files` from the page cache. Return the fraction of pages that could
    not be evicted.
    """
    paths = list(files)
    for attempt in range(_ATTEMPTS):
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                # Pages with unwritten changes cannot be dropped, so write them first.
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        if (left := resident(paths)) <= COLD:
            break
        if attempt and os.access(_DROP_CACHES, os.W_OK):
            os.sync()
            _DROP_CACHES.write_text("1")
        # Pages that are being written to the disk cannot be dropped. Wait until the
        # disk has written them.
        time.sleep(0.2)
    return left


def load(files: Iterable[Path]) -> float:
    """Read `files` into the page cache. Return the fraction of pages that are then
    cached.
    """
    paths = list(files)
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return resident(paths)


def resident(files: Iterable[Path]) -> float:
    """Return the fraction of the pages of `files` that are in the page cache, according
    to mincore(2).

    The result is right only for files that the caller owns or may write. For other
    files, the kernel reports all pages as cached.
    """
    cached = pages = 0
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                continue
            flags = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
                view = np.frombuffer(mapped, dtype=np.uint8)
                address = ctypes.c_void_p(view.ctypes.data)
                result = ctypes.c_void_p(flags.ctypes.data)
                failed = _LIBC.mincore(address, ctypes.c_size_t(size), result)
                # `mapped` cannot be closed while an array refers to its memory.
                del view
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            cached += int((flags & 1).sum())
            pages += len(flags)
    return cached / pages if pages else 0.0


def bytes_read() -> int:
    """Return the bytes that this process has read from storage. Reads from the page
    cache do not count.
    """
    return int(psutil.Process().io_counters().read_bytes)


def peak_memory(process: int | str = "self") -> int:
    """Return the peak resident memory of a process in bytes.

    `getrusage` is not used, because its peak includes the memory that the process
    shared with its parent between fork and exec.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def describe_disk(path: Path) -> dict[str, str | None]:
    """Return the file system of `path`, its mount options, its device, the model,
    scheduler and queue settings of the device, and the version of the program fio.
    Unknown values are None.
    """
    number = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()

    def read(name: str) -> str | None:
        # If the device is a partition, its disk (the parent) has the model and the
        # queue.
        for parent in (folder, folder.parent):
            if (parent / name).exists():
                return (parent / name).read_text().strip()
        return None

    mounts = [
        each
        for each in psutil.disk_partitions(all=True)
        if path.resolve().is_relative_to(each.mountpoint)
    ]
    innermost = max(mounts, key=lambda each: len(each.mountpoint))
    fio = None
    if shutil.which("fio"):
        done = subprocess.run(
            ["fio", "--version"], capture_output=True, text=True, check=False
        )
        fio = done.stdout.strip()
    return {
        "file_system": innermost.fstype,
        "mount_options": innermost.opts,
        "device": folder.name,
        "model": read("device/model"),
        "scheduler": read("queue/scheduler"),
        "queue": ", ".join(f"{name} {read(f'queue/{name}')}" for name in _QUEUE),
        "fio": fio,
    }
