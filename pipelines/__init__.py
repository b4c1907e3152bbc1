"""The application: sources of images, the build plan, execution engines, jobs, and the command line.

The names below are the interface for Python programs. They are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.api import build_index, quantize_index, train
    from pipelines.jobs.build_result import BuildResult
    from pipelines.jobs.quantize import QuantizeResult
    from pipelines.jobs.training.result import TrainResult
    from pipelines.progress.stopping import JobStopped

_MODULES = {
    "BuildResult": "pipelines.jobs.build_result",
    "JobStopped": "pipelines.progress.stopping",
    "QuantizeResult": "pipelines.jobs.quantize",
    "TrainResult": "pipelines.jobs.training.result",
    "build_index": "pipelines.api",
    "quantize_index": "pipelines.api",
    "train": "pipelines.api",
}

__all__ = ["BuildResult", "JobStopped", "QuantizeResult", "TrainResult", "build_index", "quantize_index", "train"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage_formats.extras import name_missing_extra

    with name_missing_extra("build"):
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
