"""Measures free memory and free disk space, and counts CUDA devices, without importing torch."""

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
    """Return the memory in bytes that is available without swapping, within the limit of the container."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _read_cgroup("memory.max"), _read_cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used) + _file_cache()))
    return available


def free_disk(path: Path) -> int:
    """Return the free disk space at `path` in bytes. The path need not exist."""
    existing = next(directory for directory in (path, *path.absolute().parents) if directory.exists())
    return shutil.disk_usage(existing).free


def cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use."""
    # A separate process counts the devices, so that this process does not import torch.
    if not has_gpu_node():
        return 0
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    last_word = done.stdout.split()[-1:] if done.returncode == 0 else []
    return int(last_word[0]) if last_word and last_word[0].isdigit() else 0


def has_gpu_node() -> bool:
    """Return True if the operating system has a device file of an NVIDIA or AMD GPU."""
    return any(os.path.exists(node) for node in _GPU_NODES)


def _file_cache() -> int:
    """Return the size of the container's page cache in bytes. The kernel frees this memory when it is needed."""
    fields = dict(line.split() for line in _read_cgroup("memory.stat").splitlines())
    return sum(int(fields.get(name, 0)) for name in ("inactive_file", "active_file"))


def _read_cgroup(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""
