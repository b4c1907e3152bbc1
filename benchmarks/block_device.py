"""Describes the disk that holds a path, for reports."""

from __future__ import annotations

import os
from pathlib import Path


def storage(path: Path) -> dict[str, str | None]:
    """Return the file system, mount options, device, model and I/O scheduler of the disk that contains `path`.

    Unknown values are None.
    """
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mount = {"file_system": None, "mount_options": None, **_mount(device)}
    folder, disk = _folders(device)
    scheduler = _text(disk / "queue/scheduler")
    return {
        **mount,
        "device": folder.name if folder.exists() else device,
        "model": _text(disk / "device/model"),
        "rotational": _text(disk / "queue/rotational"),
        "scheduler": scheduler.partition("[")[2].partition("]")[0] or scheduler if scheduler else None,
    }


def logical_block_bytes(path: Path) -> int | None:
    """Return the logical block size in bytes of the disk that contains `path`; None if the block size is unknown."""
    number = os.stat(path).st_dev
    size = _text(_folders(f"{os.major(number)}:{os.minor(number)}")[1] / "queue/logical_block_size")
    return int(size) if size else None


def _folders(device: str) -> tuple[Path, Path]:
    """Return the /sys folder of the block device "major:minor", and the /sys folder of its disk."""
    folder = Path(f"/sys/dev/block/{device}").resolve()
    return folder, folder if (folder / "queue").exists() else folder.parent


def _mount(device: str) -> dict[str, str]:
    """Return the type and the mount options of the file system on `device`; empty if the device is not mounted."""
    mounts = _text(Path("/proc/self/mountinfo")) or ""
    for line in mounts.splitlines():
        if line.split()[2] == device:
            kind, _, options = line.partition(" - ")[2].split()[:3]
            return {"file_system": kind, "mount_options": options}
    return {}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
