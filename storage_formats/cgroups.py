"""Reads the limits of this process from its control groups (Linux cgroups), and the
memory that they and the machine leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path


def available_memory(machine: Path = Path("/")) -> int:
    """Return the memory in bytes that is available without swapping. If the process
    runs in cgroups with memory limits, for example in a container, the result is at
    most what the tightest limit leaves.

    `machine` is the root directory from which the limits are read.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used, stat in cgroup_files(
        machine,
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
        ("memory.max", "memory.current", "memory.stat"),
    ):
        if limit.isdigit() and used.isdigit():
            fields = dict(line.split() for line in stat.splitlines())
            # The used memory includes the page cache, which the kernel frees when it
            # needs the memory. In version 1, only the fields with "total_" include the
            # cgroups below.
            cache = sum(
                int(fields.get(f"total_{name}", fields.get(name, 0)))
                for name in ("inactive_file", "active_file")
            )
            available = min(available, max(0, int(limit) - int(used) + cache))
    return available


def cgroup_files(
    machine: Path, controller: str, version_1: Sequence[str], version_2: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the contents of some files of each cgroup whose limits apply to this
    process: the root of the hierarchy, the cgroup of the process, and all cgroups
    between the two.

    The content of a missing file is "". A container may have all files of a cgroup in
    the root, although the process has the path of this cgroup on the host.

    Args:
        machine: root directory, which contains ``proc`` and ``sys``.
        controller: "cpu" or "memory".
        version_1, version_2: names of the files in cgroups of version 1 and 2.
    """
    for membership in _read(machine / "proc/self/cgroup").splitlines():
        _, controllers, path = membership.split(":", 2)
        names = version_1
        root = machine / "sys/fs/cgroup" / controller
        # Version 2 has one hierarchy for all controllers.
        if not controllers:
            names = version_2
            root = root.parent
        elif controller not in controllers.split(","):
            continue
        for cgroup in accumulate(Path(path).parts[1:], Path.joinpath, initial=root):
            yield [_read(cgroup / name) for name in names]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
