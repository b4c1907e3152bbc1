"""Reads the limits of this process from its control groups (Linux cgroups)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path


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
    mount = machine / "sys/fs/cgroup"
    for membership in _read(machine / "proc/self/cgroup").splitlines():
        _, controllers, path = membership.split(":", 2)
        if controller in controllers.split(","):
            root = mount / controller
            names = version_1
        elif not controllers:
            # Version 2 has one hierarchy for all controllers.
            root = mount
            names = version_2
        else:
            continue
        for cgroup in accumulate(Path(path).parts[1:], Path.joinpath, initial=root):
            yield [_read(cgroup / name) for name in names]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
