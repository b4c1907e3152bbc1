"""CPUs that this process may use."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> int:
    """CPUs of this process' affinity, and no more than the quota of its container (cgroup v2)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _quota(_QUOTA) or cpus)


@functools.cache  # asked on each fetch, and a container's quota stays
def _quota(path: Path) -> int | None:
    """Whole CPUs, at least 1, that a ``cpu.max`` allows; None where it sets no bound."""
    try:
        allowed, _, period = path.read_text().strip().partition(" ")
    except OSError:
        return None
    return max(1, int(allowed) // int(period)) if allowed.isdigit() and period.isdigit() else None
