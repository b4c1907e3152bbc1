"""Runs one task per shard on an engine, for builds, changes, conversions and the preparation of captions.

A shard is finished once its receipt is stored. A resumed job runs only shards without a receipt.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import (
    Engine,
    EngineUnavailableError,
    Notice,
    Task,
    TaskFailure,
    WorkerFactory,
    describe_error,
)
from pipelines.progress.events import JobStopped, OnEvent, ShardMeter, ShardState, ShouldStop, StatusMessage
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from storage_formats.format.receipts import ShardReceipt

    Receipts = dict[int, ShardReceipt]


class FailedInputsError(EdjeError):
    """No input could be indexed, or more inputs failed than allowed.

    Attributes:
        problem: the error message without advice.
        over_limit: True if a larger `max_failed` lets the change continue.
    """

    def __init__(self, problem: str, remedy: str, *, over_limit: bool) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.over_limit = over_limit


@dataclass(frozen=True)
class ShardJob:
    """A job that runs one task for each shard of an index, or of the captions to train on.

    Attributes:
        activity: name of the job in progress events, such as "indexing".
        shards: numbers of the shards, ascending.
        rows: number of rows in all `shards`.
        make_worker: function that returns the worker of a process; see `pipelines.engines.base`.
        make_task: function that takes a shard number and returns the task.
        state_of_report: function that takes a progress report of a worker and returns (shard number, shard state).
        state_of_receipt: function that takes the receipt of a finished shard and returns the shard state.
        on_receipt: function that is called with every receipt, including receipts of earlier runs. This function may
            raise FailedInputsError.
        unit: word for one row in messages, in the singular.
    """

    activity: str
    shards: Sequence[int]
    rows: int
    make_worker: WorkerFactory
    make_task: Callable[[int], Task]
    state_of_report: Callable[[Any], tuple[int, ShardState]]
    state_of_receipt: Callable[[ShardReceipt], ShardState]
    on_receipt: Callable[[ShardReceipt], None] = lambda receipt: None
    unit: str = "row"


@dataclass(frozen=True)
class ShardRun:
    """The result of `run_shards`.

    Attributes:
        receipts: the receipt of every shard, in the order of the shards.
        rows: number of rows that this run finished. Rows that an earlier run stored do not count.
        seconds: wall time of this run.
    """

    receipts: list[ShardReceipt]
    rows: int
    seconds: float


def run_shards(
    job: ShardJob, earlier: Receipts, engine: Engine, on_event: OnEvent, should_stop: ShouldStop
) -> ShardRun:
    """Run the shards of `job` that have no receipt in `earlier`. Return the receipts of all shards.

    Raises:
        JobStopped: `should_stop()` returned True, a shard failed, or the engine failed. Finished shards are kept.
        UsageError, EngineUnavailableError: the engine cannot run as requested.
        FailedInputsError: `job.on_receipt` raised this error.
    """
    started = time.monotonic()
    receipts = dict(earlier)
    missing = [shard for shard in job.shards if shard not in earlier]
    with _stopped_by_errors(job, receipts):
        meter = ShardMeter(job.activity, job.rows, len(job.shards))
        for receipt in earlier.values():  # the times of earlier runs do not count
            meter.finish(receipt.shard, replace(job.state_of_receipt(receipt), stage_seconds={}))
            job.on_receipt(receipt)
        outcomes = engine.run(
            job.make_worker,
            map(job.make_task, missing),
            on_progress=lambda report: on_event(meter.update(*job.state_of_report(report))),
            should_stop=should_stop,
        )
        with contextlib.closing(outcomes):
            for outcome in outcomes if missing else ():
                if isinstance(outcome, Notice):
                    on_event(StatusMessage(outcome.message, outcome.is_warning))
                    continue
                if isinstance(outcome, TaskFailure):
                    raise _failure(outcome)
                receipt = outcome.result
                receipts[receipt.shard] = receipt
                on_event(meter.finish(receipt.shard, job.state_of_receipt(receipt)))
                job.on_receipt(receipt)
        if len(receipts) < len(job.shards):
            raise JobStopped("stopped")
    rows = sum(receipts[shard].rows for shard in missing)
    return ShardRun([receipts[shard] for shard in sorted(receipts)], rows, time.monotonic() - started)


@contextlib.contextmanager
def _stopped_by_errors(job: ShardJob, receipts: Receipts) -> Iterator[None]:
    """Context manager that converts an error to JobStopped if a second run may succeed."""
    try:
        yield
    except (UsageError, EngineUnavailableError, FailedInputsError):
        raise
    except (EdjeError, OSError) as error:
        rows = sum(receipt.rows for receipt in receipts.values())
        raise JobStopped(
            f"{describe_error(error)}; {rows:,} of {counted(job.rows, job.unit)} are kept, {len(receipts):,} of "
            f"{counted(len(job.shards), 'shard')} are finished"
        ) from error


def _failure(failure: TaskFailure) -> EdjeError:
    error = EdjeError(f"shard {failure.task.shard}: {failure.message}")
    if failure.trace:
        error.add_note(failure.trace)
    return error
