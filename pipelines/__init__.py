"""The application: sources of images, execution engines, jobs, and the command line.

The names in `__all__` are the public Python interface: each job is a function that takes keyword arguments.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.api import train
    from pipelines.jobs.add_rows import append_index, update_index
    from pipelines.jobs.build import BuildResult, build_index
    from pipelines.jobs.copy import CopyResult, compact_index, copy_index
    from pipelines.jobs.merge import merge_indexes
    from pipelines.jobs.quantize import QuantizeResult, quantize_index
    from pipelines.jobs.repair import RepairResult, repair_index
    from pipelines.jobs.snapshots import DeleteResult, delete_rows
    from pipelines.jobs.training.run import TrainResult
    from pipelines.progress.events import JobStopped

_MODULES = {
    "BuildResult": "pipelines.jobs.build",
    "CopyResult": "pipelines.jobs.copy",
    "DeleteResult": "pipelines.jobs.snapshots",
    "JobStopped": "pipelines.progress.events",
    "QuantizeResult": "pipelines.jobs.quantize",
    "RepairResult": "pipelines.jobs.repair",
    "TrainResult": "pipelines.jobs.training.run",
    "append_index": "pipelines.jobs.add_rows",
    "build_index": "pipelines.jobs.build",
    "compact_index": "pipelines.jobs.copy",
    "copy_index": "pipelines.jobs.copy",
    "delete_rows": "pipelines.jobs.snapshots",
    "merge_indexes": "pipelines.jobs.merge",
    "quantize_index": "pipelines.jobs.quantize",
    "repair_index": "pipelines.jobs.repair",
    "train": "pipelines.api",
    "update_index": "pipelines.jobs.add_rows",
}

__all__ = [
    "BuildResult",
    "CopyResult",
    "DeleteResult",
    "JobStopped",
    "QuantizeResult",
    "RepairResult",
    "TrainResult",
    "append_index",
    "build_index",
    "compact_index",
    "copy_index",
    "delete_rows",
    "merge_indexes",
    "quantize_index",
    "repair_index",
    "train",
    "update_index",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage_formats.extras import name_missing_extra

    with name_missing_extra("build"):
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
