"""The application: sources of images, the build plan, execution engines, jobs, and the command line.

The names in `__all__` are the public Python interface.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.api import (
        append_index,
        build_index,
        compact_index,
        copy_index,
        delete_rows,
        merge_indexes,
        quantize_index,
        repair_index,
        retry_failed,
        train,
        update_index,
    )
    from pipelines.jobs.append import AppendResult
    from pipelines.jobs.build_result import BuildResult
    from pipelines.jobs.compact import CompactResult
    from pipelines.jobs.copy import CopyResult
    from pipelines.jobs.merge import MergeResult
    from pipelines.jobs.quantize import QuantizeResult
    from pipelines.jobs.repair import RepairResult
    from pipelines.jobs.retry_failed import RetryResult
    from pipelines.jobs.snapshots import DeleteResult
    from pipelines.jobs.training.run import TrainResult
    from pipelines.jobs.update import UpdateResult
    from pipelines.progress.events import JobStopped

_MODULES = {
    "AppendResult": "pipelines.jobs.append",
    "BuildResult": "pipelines.jobs.build_result",
    "CompactResult": "pipelines.jobs.compact",
    "CopyResult": "pipelines.jobs.copy",
    "DeleteResult": "pipelines.jobs.snapshots",
    "JobStopped": "pipelines.progress.events",
    "MergeResult": "pipelines.jobs.merge",
    "QuantizeResult": "pipelines.jobs.quantize",
    "RepairResult": "pipelines.jobs.repair",
    "RetryResult": "pipelines.jobs.retry_failed",
    "TrainResult": "pipelines.jobs.training.run",
    "UpdateResult": "pipelines.jobs.update",
    "append_index": "pipelines.api",
    "build_index": "pipelines.api",
    "compact_index": "pipelines.api",
    "copy_index": "pipelines.api",
    "delete_rows": "pipelines.api",
    "merge_indexes": "pipelines.api",
    "quantize_index": "pipelines.api",
    "repair_index": "pipelines.api",
    "retry_failed": "pipelines.api",
    "train": "pipelines.api",
    "update_index": "pipelines.api",
}

__all__ = [
    "AppendResult",
    "BuildResult",
    "CompactResult",
    "CopyResult",
    "DeleteResult",
    "JobStopped",
    "MergeResult",
    "QuantizeResult",
    "RepairResult",
    "RetryResult",
    "TrainResult",
    "UpdateResult",
    "append_index",
    "build_index",
    "compact_index",
    "copy_index",
    "delete_rows",
    "merge_indexes",
    "quantize_index",
    "repair_index",
    "retry_failed",
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
