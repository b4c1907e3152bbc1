"""Describes the machine and the installed packages, for reports of benchmarks and of bugs."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_DISTRIBUTION = "edje-index"
_PACKAGES = (_DISTRIBUTION, "torch", "numpy", "zarr", "ray", "faiss-cpu", "pyarrow", "pillow", "tensorstore")


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


def dependencies() -> dict[str, str]:
    """Return the versions of the installed packages that edje-index or one of its extras requires."""
    try:
        lines = requires(_DISTRIBUTION) or ()
    except PackageNotFoundError:  # run from a checkout that is not installed
        return {}
    names = {match[0] for line in lines if (match := re.match(r"[\w.-]+", line))}
    return {name: installed for name in sorted(names, key=str.lower) if (installed := _version(name))}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
