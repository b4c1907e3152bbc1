"""The sum of all shards' progress, and the bottleneck."""

from __future__ import annotations

import pytest

from pipelines.progress.events import FinishedShard, Progress, ShardCounts
from pipelines.progress.meter import ShardMeter, ShardState, bottleneck


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"wait": 3.0, "encode": 1.0, "write": 1.0, "decode": 99.0}, "decode"),
        ({"wait": 1.0, "encode": 3.0, "write": 1.0}, "model"),
        ({"wait": 1.0, "encode": 1.0, "write": 3.0}, "write"),
        ({}, None),
        ({"wait": 0.0, "encode": 0.0, "write": 0.0}, None),
    ],
)
def test_the_bottleneck_is_the_stage_that_takes_longest(seconds, expected):
    assert bottleneck(seconds) == expected


def test_progress_adds_up_running_finished_and_earlier_shards():
    meter = ShardMeter("indexing", rows=40, shards=4)
    meter.finish(0, ShardState(10, failed=1))
    meter.update(1, ShardState(6, 2, {"encode": 1.0}))
    assert meter.update(2, ShardState(4, 0, {"encode": 0.5, "wait": 1.2})) == Progress(
        "indexing", 20, 40, ShardCounts(1, 4, 3, "model")
    )
    assert meter.finish(1, ShardState(10, 2, {"wait": 2.0})) == Progress(
        "indexing", 24, 40, ShardCounts(2, 4, 3, "decode"), FinishedShard(1, 10, 2, {"wait": 2.0})
    )


def test_a_shard_that_starts_again_on_another_worker_counts_once():
    meter = ShardMeter("indexing", rows=10, shards=1)
    meter.update(0, ShardState(8))
    assert meter.update(0, ShardState(2)).done == 2
