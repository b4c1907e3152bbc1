"""Copies rows into new shards, for compactions and merges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.engines import open_engine
from pipelines.engines.base import TaskInterrupted
from pipelines.jobs.shard_run import ShardJob, run_shards
from pipelines.planning.machine import free_disk
from pipelines.planning.resources import disk_need
from pipelines.progress.events import OnEvent, PlanReady
from pipelines.progress.meter import ShardState
from pipelines.progress.stopping import ShouldStop
from pipelines.progress.wording import counted, human_bytes
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.format.receipts import ShardReceipt
    from storage_formats.writing.row_copy import RowCopier, RowCopy


@dataclass(frozen=True)
class ShardCopy:
    """Task that writes the new shard with the number `shard`."""

    shard: int


def copy_rows(
    copy: RowCopy, activity: str, finished: Mapping[int, ShardReceipt], on_event: OnEvent, should_stop: ShouldStop
) -> list[ShardReceipt]:
    """Write the shards of `copy` that have no receipt in `finished`. Return the receipts of all shards of `copy`.

    Raises:
        UsageError: the disk is too small.
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
    """
    from storage_formats.writing.begin import clear_staging
    from storage_formats.writing.row_copy import RowCopier

    _check_disk(copy, len(copy.shards) - len(finished))
    clear_staging(copy.target)
    rows = copy.segment.rows
    on_event(PlanReady(rows, len(copy.shards), len(finished)))
    with RowCopier(copy) as copier:
        job = ShardJob(
            activity=activity,
            shards=copy.shards,
            rows=rows,
            make_worker=lambda: functools.partial(_copy_shard, copier),
            make_task=ShardCopy,
            state_of_report=lambda report: report,
            state_of_receipt=lambda receipt: ShardState(receipt.rows),
        )
        return run_shards(job, dict(finished), open_engine("inline", None), on_event, should_stop).receipts


def _copy_shard(
    copier: RowCopier, task: ShardCopy, on_progress: Callable[[Any], None], should_stop: ShouldStop
) -> ShardReceipt:
    from storage_formats.writing.row_copy import CopyInterrupted

    try:
        return copier.copy_shard(task.shard, lambda done: on_progress((task.shard, ShardState(done))), should_stop)
    except CopyInterrupted as error:
        raise TaskInterrupted from error


def _check_disk(copy: RowCopy, shards: int) -> None:
    """Raise UsageError if the disk has no room for `shards` shards of `copy`."""
    whole = disk_need(replace(copy.spec, rows=copy.segment.rows, segments=()))
    need, free = whole.total * shards // len(copy.shards), free_disk(copy.target)
    if need > free:
        raise UsageError(
            f"copying {counted(copy.segment.rows, 'row')} needs {human_bytes(need)} of disk space, but only "
            f"{human_bytes(free)} are free at {copy.target}; free some disk space"
        )
