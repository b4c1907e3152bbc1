"""The machine: its memory, disk space and devices, and the installed packages."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_DISTRIBUTION = "edje-index"
# device files of GPUs: NVIDIA, WSL and AMD
_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
_PROBE = "import torch; print(torch.cuda.device_count())"
_PACKAGES = (
    _DISTRIBUTION,
    "torch",
    "numpy",
    "zarr",
    "ray",
    "faiss-cpu",
    "pyarrow",
    "pillow",
    "tensorstore",
)


def environment() -> dict[str, Any]:
    """Return the date (UTC), the hardware, the kernel, and the versions of Python
    and of the main packages.
    """
    import psutil

    info = Path("/proc/cpuinfo")
    lines = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*: (.+)", lines, re.MULTILINE)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": name[1] if name else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": _versions(_PACKAGES),
    }


def dependencies() -> dict[str, str]:
    """Return the versions of the installed packages that edje-index or one of its
    extras requires.
    """
    try:
        lines = requires(_DISTRIBUTION) or ()
    except PackageNotFoundError:
        # The code runs from a checkout that is not installed as a package.
        return {}
    names = {match[0] for line in lines if (match := re.match(r"[\w.-]+", line))}
    return _versions(sorted(names, key=str.lower))


def _versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages in `names` that are installed."""
    versions = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def free_disk(path: Path) -> int:
    """Return the free disk space at `path` in bytes. If `path` does not exist, its
    nearest existing parent counts.
    """
    existing = next(
        directory
        for directory in (path, *path.absolute().parents)
        if directory.exists()
    )
    return shutil.disk_usage(existing).free


@functools.cache
def cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use."""
    # A separate process counts the devices, so that this process does not import torch.
    if not any(os.path.exists(node) for node in _GPU_NODES):
        return 0
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False
    )
    last_word = done.stdout.split()[-1:] if done.returncode == 0 else []
    return int(last_word[0]) if last_word and last_word[0].isdigit() else 0
