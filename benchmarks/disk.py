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

# A run is cold if at most this fraction of the pages of its files is in the page cache
# when it starts.
_COLD = 0.01
WARM = 0.99
"""A run is warm if at least this fraction of the pages of its files is in the page
cache when it starts.
"""
_ATTEMPTS = 3
_LIBC = ctypes.CDLL(None, use_errno=True)


def evict(files: Iterable[Path]) -> dict[str, str]:
    """Evict `files` from the page cache. Return the `problem` of a cold run if too many
    of their pages are still cached, otherwise an empty dictionary.
    """
    paths = list(files)
    for _ in range(_ATTEMPTS):
        for path in paths:
            with path.open("rb") as file:
                # Pages with unwritten changes cannot be dropped, so write them first.
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (left := resident(paths)) <= _COLD:
            return {}
        # Pages that are being written to the disk cannot be dropped. Wait until the
        # disk has written them.
        time.sleep(0.2)
    return {"problem": f"not cold: {left:.1%} of the pages could not be evicted"}


def load(files: Iterable[Path]) -> None:
    """Read `files` into the page cache."""
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)


def resident(files: Iterable[Path]) -> float:
    """Return the fraction of the pages of `files` that are in the page cache, according
    to mincore(2).

    The result is right only for files that the caller owns or may write. For other
    files, the kernel reports all pages as cached.
    """
    cached = pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        flags = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
        start, result = (ctypes.c_void_p(each.ctypes.data) for each in (mapped, flags))
        if _LIBC.mincore(start, ctypes.c_size_t(size), result):
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


def describe_disk(path: Path) -> str:
    """Return the device, the file system and the mount options of `path`, and the model
    and queue of the device.
    """
    mount = _words("findmnt", "-no", "SOURCE,FSTYPE,OPTIONS", "-T", str(path))
    columns = "MODEL,SCHED,RQ-SIZE,RA,LOG-SEC,ROTA"
    queue = _words("lsblk", "-dno", columns, *mount[:1])
    return f"{' '.join(mount)}; {columns}: {' '.join(queue)}"


def fio_version() -> str | None:
    """Return the version of the program fio, or None if it is not installed."""
    return next(iter(_words("fio", "--version")), None)


def _words(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split()
