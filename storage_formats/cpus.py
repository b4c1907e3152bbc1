"""The CPUs that this process may use: their number, and whether they have bfloat16
instructions.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

# x86, x86, ARM
_BFLOAT16_FEATURES = ("avx512bf16", "amx-bf16", "bf16")
QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, at most the CPU quota of
    the container (cgroup v2).
    """
    cpus = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return min(cpus, _quota(QUOTA_FILE) or cpus)


@functools.cache
def has_bfloat16() -> bool:
    """Return True if the processor has instructions for products of bfloat16
    matrices.
    """
    from llvmlite import binding  # type: ignore[import-untyped]

    features = binding.get_host_cpu_features()
    return any(features.get(name, False) for name in _BFLOAT16_FEATURES)


# called for each fetch, and the quota of a container does not change
@functools.cache
def _quota(path: Path) -> int | None:
    """Return the number of CPUs that the `cpu.max` file at `path` allows, at least
    1; None if there is no limit.
    """
    try:
        allowed, _, period = path.read_text().strip().partition(" ")
    except OSError:
        return None
    return (
        max(1, int(allowed) // int(period))
        if allowed.isdigit() and period.isdigit()
        else None
    )
