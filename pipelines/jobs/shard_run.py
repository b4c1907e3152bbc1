"""Runs one task per shard on an engine, for builds, changes, conversions and the preparation of captions.

A shard is finished once its receipt is stored. A resumed job runs only shards without a receipt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from edje_index.progress import ShardProgress
from pipelines.engines.base import (
    Engine,
    EngineUnavailableError,
    Task,
    TaskFailedError,
    WorkerFactory,
    describe_error,
)
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShardMeter, ShouldStop
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from storage_formats.format.receipts import ShardReceipt


def run_shards(
    activity: str,
    shards: Sequence[int],
    rows: int,
    earlier: Mapping[int, ShardReceipt],
    *,
    engine: Engine,
    make_worker: WorkerFactory,
    make_task: Callable[[int], Task],
    on_event: OnEvent,
    should_stop: ShouldStop,
    shows_failed: bool = False,
    unit: str = "row",
) -> Generator[ShardReceipt, None, None]:
    """Run the tasks of the shards that have no receipt in `earlier`. Yield the receipts of all shards.

    Args:
        activity: name of the job in progress events, such as "indexing".
        shards: numbers of the shards, ascending.
        rows: number of rows in all `shards`.
        earlier: receipts of earlier runs, by shard. They are yielded first.
        engine: runs the tasks.
        make_worker: function that returns the worker of a process; see `pipelines.engines.base`. The worker reports
            `ShardProgress`.
        make_task: function that takes a shard number and returns the task.
        on_event: receives the events of the job.
        should_stop: called often; the job stops once it returns True.
        shows_failed: whether the failed rows of the receipts are part of the progress.
        unit: word for one row in messages, in the singular.

    Raises:
        JobStopped: `should_stop()` returned True, a shard failed, or the engine failed. Finished shards are kept.
        UsageError, EngineUnavailableError: the engine cannot run as requested.
    """
    meter = ShardMeter(activity, rows, len(shards))
    finished = finished_rows = 0

    def finish(receipt: ShardReceipt, seconds: Mapping[str, float]) -> Progress:
        nonlocal finished, finished_rows
        finished, finished_rows = finished + 1, finished_rows + receipt.rows
        failed = sum(receipt.failed.values()) if shows_failed else 0
        return meter.update(ShardProgress(receipt.shard, receipt.rows, failed, seconds), is_final=True)

    try:
        for receipt in earlier.values():
            finish(receipt, {})  # times of earlier runs do not count
            yield receipt
        missing = [shard for shard in shards if shard not in earlier]
        receipts = engine(
            make_worker,
            map(make_task, missing),
            on_progress=lambda report: on_event(meter.update(report)),
            on_event=on_event,
            should_stop=should_stop,
        )
        with contextlib.closing(receipts):
            for receipt in receipts if missing else ():
                on_event(finish(receipt, receipt.seconds))
                yield receipt
        if finished < len(shards):
            raise JobStopped("stopped")
    except (UsageError, EngineUnavailableError):
        raise
    except (EdjeError, OSError) as error:  # a second run may succeed
        of_shard = f"shard {error.task.shard}: " if isinstance(error, TaskFailedError) else ""
        raise JobStopped(
            f"{of_shard}{describe_error(error)}; {finished_rows:,} of {counted(rows, unit)} are kept, {finished:,} of "
            f"{counted(len(shards), 'shard')} are finished"
        ) from error
