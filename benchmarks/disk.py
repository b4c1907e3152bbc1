"""Evicts files from the page cache, counts cached pages and bytes read, and describes a disk. Linux only."""

from __future__ import annotations

import ctypes
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
_ATTEMPTS = 3
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LIBC = ctypes.CDLL(None, use_errno=True)


def evict(files: Iterable[Path]) -> float:
    """Evict `files` from the page cache. Return the fraction of pages that could not be evicted."""
    paths = list(files)
    for attempt in range(_ATTEMPTS):
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # dirty pages cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        if (left := resident(paths)) <= COLD:
            break
        if attempt and os.access(_DROP_CACHES, os.W_OK):
            os.sync()
            _DROP_CACHES.write_text("1")
        time.sleep(0.2)  # pages that are still written cannot be dropped
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
    """Return the fraction of the pages of `files` that are in the page cache, as mincore(2) counts them.

    The kernel counts only files that the caller owns or may write. It calls all pages of other files cached.
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
                address, result = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(flags.ctypes.data)
                failed = _LIBC.mincore(address, ctypes.c_size_t(size), result)
                del view  # the mapping cannot be closed while a view exists
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            cached += int((flags & 1).sum())
            pages += len(flags)
    return cached / pages if pages else 0.0


def bytes_read() -> int:
    """Return the bytes that this process has read from storage. Reads from the page cache do not count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def describe_disk(path: Path) -> dict[str, str | None]:
    """Return the file system, mount options, device, model and I/O scheduler of the disk that contains `path`.

    Unknown values are None.
    """
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mounts = {line.split()[2]: line for line in (_text(Path("/proc/self/mountinfo")) or "").splitlines()}
    file_system, _, options = [*mounts.get(device, "").partition(" - ")[2].split()[:3], None, None, None][:3]
    scheduler = _text(_queue(path) / "scheduler") or ""
    return {
        "file_system": file_system,
        "mount_options": options,
        "device": Path(f"/sys/dev/block/{device}").resolve().name,
        "model": _text(_queue(path).parent / "device/model"),
        "scheduler": scheduler.partition("[")[2].partition("]")[0] or scheduler or None,
    }


def sector_bytes(path: Path) -> int:
    """Return the number of bytes that offsets and lengths of direct reads are multiples of."""
    return int(_text(_queue(path) / "logical_block_size") or mmap.PAGESIZE)


def _queue(path: Path) -> Path:
    """Return the /sys folder with the queue of the disk that contains `path`. A partition has none of its own."""
    number = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return folder / "queue" if (folder / "queue").exists() else folder.parent / "queue"


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
