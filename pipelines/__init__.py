"""The application: sources of images, execution engines, jobs, and the command line.

Each job is a function whose options are keyword arguments. `edje_index` exports all
names in `__all__`, too, so that users need not import `pipelines`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import edje_index

if TYPE_CHECKING:
    from pipelines.jobs.ann import add_ann as add_ann
    from pipelines.jobs.build import BuildResult as BuildResult
    from pipelines.jobs.build import build_index as build_index
    from pipelines.jobs.copy import CopyResult as CopyResult
    from pipelines.jobs.copy import compact_index as compact_index
    from pipelines.jobs.copy import copy_index as copy_index
    from pipelines.jobs.copy import merge_indexes as merge_indexes
    from pipelines.jobs.hub import copy_model as copy_model
    from pipelines.jobs.quantize import QuantizeResult as QuantizeResult
    from pipelines.jobs.quantize import quantize_index as quantize_index
    from pipelines.jobs.repair import RepairResult as RepairResult
    from pipelines.jobs.repair import repair_index as repair_index
    from pipelines.jobs.snapshots import DeleteResult as DeleteResult
    from pipelines.jobs.snapshots import delete_rows as delete_rows
    from pipelines.jobs.snapshots import set_columns as set_columns
    from pipelines.jobs.training.run import TrainResult as TrainResult
    from pipelines.jobs.training.run import train as train
    from pipelines.jobs.update import add_images as add_images
    from pipelines.jobs.update import append_index as append_index
    from pipelines.jobs.update import update_index as update_index
    from pipelines.progress.events import JobStopped as JobStopped

__all__ = sorted(name for names in edje_index.JOBS.values() for name in names.split())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(edje_index, name)


__dir__ = __all__.copy
