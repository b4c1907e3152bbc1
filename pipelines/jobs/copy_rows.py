"""Copies rows into new shards, for compactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipelines.engines.base import TaskInterrupted
from pipelines.jobs.copy_shards import CopyJob, copy_shards
from pipelines.planning.machine import free_disk
from pipelines.planning.resources import disk_need
from pipelines.progress.events import OnEvent, ShouldStop
from pipelines.progress.wording import counted, human_bytes
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.format.receipts import ShardReceipt
    from storage_formats.writing.row_copy import RowCopy


def copy_rows(
    copy: RowCopy, activity: str, finished: Mapping[int, ShardReceipt], on_event: OnEvent, should_stop: ShouldStop
) -> list[ShardReceipt]:
    """Write the shards of `copy` that have no receipt in `finished`. Return the receipts of all shards of `copy`.

    Raises:
        UsageError: the disk is too small.
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
    """
    from storage_formats.writing.row_copy import CopyInterrupted, RowCopier

    _check_disk(copy, len(copy.shards) - len(finished))
    job = CopyJob(activity, copy.target, copy.shards, copy.segment.rows, finished)
    with RowCopier(copy) as copier:

        def copy_shard(shard: int, on_rows: Callable[[int], None], should_stop: ShouldStop) -> ShardReceipt:
            try:
                return copier.copy_shard(shard, on_rows, should_stop)
            except CopyInterrupted as error:
                raise TaskInterrupted from error

        return copy_shards(job, copy_shard, on_event, should_stop)


def _check_disk(copy: RowCopy, shards: int) -> None:
    """Raise UsageError if the disk has no room for `shards` shards of `copy`."""
    whole = disk_need(replace(copy.spec, rows=copy.segment.rows, segments=()))
    need, free = whole.total * shards // len(copy.shards), free_disk(copy.target)
    if need > free:
        raise UsageError(
            f"copying {counted(copy.segment.rows, 'row')} needs {human_bytes(need)} of disk space, but only "
            f"{human_bytes(free)} are free at {copy.target}; free some disk space"
        )
