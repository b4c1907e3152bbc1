"""Describes the machine and the installed packages, for reports."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("edje-index", "torch", "numpy", "zarr", "ray", "faiss-cpu", "pyarrow", "pillow", "tensorstore")


def environment() -> dict[str, Any]:
    """Return the date (UTC), the hardware, the kernel, and the versions of Python and of the main packages."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: installed for name in _PACKAGES if (installed := _version(name))},
    }


def storage(path: Path) -> dict[str, str | None]:
    """Describe the disk that contains `path`. Unknown values are None."""
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


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
