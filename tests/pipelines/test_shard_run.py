"""One task per shard: resuming, stopping and failing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipelines.engines.base import EngineUnavailableError, TaskFailedError
from pipelines.jobs.shard_run import run_shards
from pipelines.progress.events import JobStopped
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.receipts import ShardReceipt

SPEC = IndexSpec(rows=10, shard_size=4, block_shape=(4, 16), embed_dim=8)


@dataclass(frozen=True)
class Task:
    shard: int


def receipt(shard, stage="encode"):
    return ShardReceipt(shard, "plan", len(SPEC.shard_rows(shard)), 1, 0, {}, (), {stage: 1.0})


class Engine:
    """Finishes tasks, but at one shard raises `error`."""

    def __init__(self, at=None, error=None):
        self.at, self.error, self.shards = at, error, []

    def __call__(self, make_worker, tasks, *, on_progress, on_event, should_stop):
        for task in tasks:
            if should_stop():
                return
            if task.shard == self.at:
                raise self.error
            self.shards.append(task.shard)
            yield receipt(task.shard)


def run(engine, earlier=(), should_stop=lambda: False):
    """Run with the receipts of an earlier run that spent its time waiting; returns the result and the events."""
    events = []
    finished = run_shards(
        "testing",
        range(SPEC.shards),
        SPEC.rows,
        {shard: receipt(shard, "wait") for shard in earlier},
        engine=engine,
        make_worker=None,
        make_task=Task,
        on_event=events.append,
        should_stop=should_stop,
    )
    return list(finished), events


def test_only_shards_without_a_receipt_run():
    engine = Engine()
    receipts, events = run(engine, earlier=[1])
    assert engine.shards == [0, 2]
    assert [done.shard for done in receipts] == [1, 0, 2]
    assert (events[-1].activity, events[-1].done, events[-1].total) == ("testing", 10, 10)
    assert events[-1].finished_shards == 3


def test_nothing_runs_if_all_shards_are_finished():
    engine = Engine()
    receipts, events = run(engine, earlier=[0, 1, 2])
    assert (engine.shards, len(receipts), events) == ([], 3, [])


def test_times_of_earlier_runs_do_not_make_the_bottleneck():
    _, events = run(Engine(), earlier=[0, 1])
    assert {event.bottleneck for event in events} == {"model"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TaskFailedError("no space left", Task(1)), "shard 1: no space left"),
        (EdjeError("the engine broke down"), "the engine broke down"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_failure_stops_the_job_and_says_how_much_is_kept(error, words):
    with pytest.raises(JobStopped, match=f"^{words}; 4 of 10 rows are kept, 1 of 3 shards are finished$"):
        run(Engine(1, error))


def test_a_stop_keeps_finished_shards():
    engine = Engine()
    with pytest.raises(JobStopped, match=r"^stopped; 8 of 10 rows are kept, 2 of 3 shards are finished$"):
        run(engine, should_stop=lambda: len(engine.shards) == 2)


@pytest.mark.parametrize("error", [UsageError("wrong"), EngineUnavailableError("no Ray")])
def test_a_request_that_cannot_run_is_not_a_stop(error):
    with pytest.raises(type(error)):
        run(Engine(0, error))
