"""What this machine has to give: memory, disk, CUDA devices. Nothing here imports torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # NVIDIA, WSL, AMD
_PROBE = "import torch; print(torch.cuda.device_count())"


def available_memory() -> int:
    """Bytes of memory that can be had without swapping: the machine's, or what the container has left."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _read_cgroup("memory.max"), _read_cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used) + _file_cache()))
    return available


def _file_cache() -> int:
    """Bytes of files in the container's page cache: counted as used, and given up when memory is short."""
    fields = dict(line.split() for line in _read_cgroup("memory.stat").splitlines())
    return sum(int(fields.get(name, 0)) for name in ("inactive_file", "active_file"))


def free_disk(path: Path) -> int:
    """Bytes that can be written where `path` is or will be."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def cuda_devices() -> int:
    """CUDA devices that torch sees; asked of another process, so that this one need not load torch.

    Without a GPU's device file nothing is started and the answer is 0.
    """
    if not any(os.path.exists(node) for node in _GPU_NODES):
        return 0
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    last = done.stdout.split()[-1:] if done.returncode == 0 else []
    return int(last[0]) if last and last[0].isdigit() else 0


def _read_cgroup(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""
