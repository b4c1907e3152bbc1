"""The application: sources of images, execution engines, jobs, and the command line.

The names in `__all__` are the public Python interface: each job is a function that takes keyword arguments.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.jobs.add_rows import append_index as append_index
    from pipelines.jobs.add_rows import update_index as update_index
    from pipelines.jobs.build import BuildResult as BuildResult
    from pipelines.jobs.build import build_index as build_index
    from pipelines.jobs.copy import CopyResult as CopyResult
    from pipelines.jobs.copy import compact_index as compact_index
    from pipelines.jobs.copy import copy_index as copy_index
    from pipelines.jobs.merge import merge_indexes as merge_indexes
    from pipelines.jobs.quantize import QuantizeResult as QuantizeResult
    from pipelines.jobs.quantize import quantize_index as quantize_index
    from pipelines.jobs.repair import RepairResult as RepairResult
    from pipelines.jobs.repair import repair_index as repair_index
    from pipelines.jobs.snapshots import DeleteResult as DeleteResult
    from pipelines.jobs.snapshots import delete_rows as delete_rows
    from pipelines.jobs.training.run import TrainResult as TrainResult
    from pipelines.jobs.training.run import train as train
    from pipelines.progress.events import JobStopped as JobStopped

_NAMES = {
    "pipelines.jobs.add_rows": "append_index update_index",
    "pipelines.jobs.build": "BuildResult build_index",
    "pipelines.jobs.copy": "CopyResult compact_index copy_index",
    "pipelines.jobs.merge": "merge_indexes",
    "pipelines.jobs.quantize": "QuantizeResult quantize_index",
    "pipelines.jobs.repair": "RepairResult repair_index",
    "pipelines.jobs.snapshots": "DeleteResult delete_rows",
    "pipelines.jobs.training.run": "TrainResult train",
    "pipelines.progress.events": "JobStopped",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage_formats.extras import name_missing_extra

    with name_missing_extra("build"):
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
