"""Rates, the time left and the bottleneck."""

from __future__ import annotations

import pytest

from pipelines.progress.meter import BuildMeter, ShardState, bottleneck


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


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
def test_bottleneck_is_where_the_workers_loop_spends_its_time(seconds, expected):
    assert bottleneck(seconds) == expected


def test_progress_adds_up_open_finished_and_earlier_shards():
    clock = Clock()
    meter = BuildMeter(rows=40, shards=4, clock=clock)
    meter.finished_earlier(10, failed=1)
    clock.now += 2
    meter.report(1, ShardState(6, 2, {"encode": 1.0}))
    meter.report(2, ShardState(4, 0, {"encode": 0.5}))
    progress = meter.progress()
    assert (progress.rows_done, progress.shards_done, progress.failed) == (20, 1, 3)
    assert progress.images_per_second == pytest.approx(5.0)
    assert progress.seconds_left == pytest.approx(4.0)
    assert progress.bottleneck == "model"
    meter.finished(1, ShardState(10, 2, {"encode": 2.0}))
    assert (meter.progress().rows_done, meter.progress().shards_done) == (24, 2)


def test_rates_forget_what_is_long_past():
    clock = Clock()
    meter = BuildMeter(rows=10_000, shards=10, clock=clock)
    for second in range(1, 101):
        clock.now += 1
        slow = min(second, 50)
        meter.report(0, ShardState(slow + 10 * max(0, second - 50), 0, {"wait": slow, "write": 2.0 * (second - slow)}))
    assert meter.progress().images_per_second == pytest.approx(10.0)
    assert meter.progress().bottleneck == "write"


def test_nothing_is_promised_before_anything_was_measured():
    progress = BuildMeter(rows=5, shards=1).progress()
    assert (progress.images_per_second, progress.seconds_left, progress.bottleneck) == (0.0, None, None)


def test_a_shard_that_starts_again_on_another_worker_gives_no_negative_rate():
    clock = Clock()
    meter = BuildMeter(rows=10, shards=1, clock=clock)
    clock.now += 1
    meter.report(0, ShardState(8, 0))
    clock.now += 60
    meter.report(0, ShardState(2, 0))
    assert meter.progress().images_per_second >= 0
