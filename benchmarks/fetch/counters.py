"""Reads kernel counters of the process and of the disk. Linux only."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_SECTOR = 512  # Documentation/block/stat.rst: a sector is 512 bytes on every device


@dataclass(frozen=True)
class Counters:
    """Values of kernel counters at one time.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: user and system time of all threads of this process.
        read_bytes: bytes that this process read from storage (/proc/self/io). Reads from the page cache do not count.
        device_bytes: bytes that all processes read from the disk; None if the disk has no counter.
        major_faults: page faults of this process that caused a disk read.
        refaults: file pages in the whole system that were evicted for lack of memory and read again.
    """

    seconds: float
    cpu_seconds: float
    read_bytes: int
    device_bytes: int | None
    major_faults: int
    refaults: int

    @classmethod
    def now(cls, path: Path) -> Counters:
        """Read the counters of this process and of the disk that contains `path`."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(
            seconds=time.perf_counter(),
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            read_bytes=_field("/proc/self/io", "read_bytes:"),
            device_bytes=device_bytes(path),
            major_faults=usage.ru_majflt,
            refaults=_field("/proc/vmstat", "workingset_refault_file"),
        )

    def since(self, before: Counters) -> dict[str, float | int | None]:
        """Return the increase of each counter since `before`, by name; None for a missing counter."""
        earlier = asdict(before)
        return {
            name: None if value is None or earlier[name] is None else value - earlier[name]
            for name, value in asdict(self).items()
        }


def device_bytes(path: Path) -> int | None:
    """Return the number of bytes read so far from the disk that contains `path`.

    Returns None if `path` is not on a block device (tmpfs, network).
    """
    number = os.stat(path).st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(stat.read_text().split()[2]) * _SECTOR
    return None


def _field(file: str, name: str) -> int:
    """Return the number after `name` in a /proc file; 0 if `name` is not in the file."""
    with contextlib.suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
