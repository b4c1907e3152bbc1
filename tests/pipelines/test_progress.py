"""Displays of events."""

from __future__ import annotations

import io
import re

from pipelines.cli.output import running_job
from pipelines.progress.display import LiveDisplay, LogDisplay, describe_plan, describe_progress, progress_display
from pipelines.progress.events import PlanReady, Progress, ShardCounts, StatusMessage, progress_callback

PROGRESS = Progress("indexing", 2048, 10_000, ShardCounts(2, 10, 3, "decode"))
PLAN = PlanReady(10_000, 10, 2, 1, 12, {".txt": 5, ".xml": 1})


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def shown(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_progress_in_words():
    assert describe_progress(PROGRESS, speed=41.25, seconds_left=193) == (
        "2,048/10,000, 41.2/s, 3m13s left, shards 2/10, 3 failed, bottleneck decode"
    )
    assert describe_progress(Progress("listing", 7)) == "7"


def test_plan_in_words():
    assert describe_plan(PLAN) == [
        "10,000 inputs in 10 shards, 1 worker",
        "12 duplicates of earlier inputs will not be encoded again",
        "ignored 6 other files: .txt 5, .xml 1",
        "resuming: 2 of 10 shards finished",
    ]
    assert describe_plan(PlanReady(1, 1)) == ["1 input in 1 shard"]


def test_a_log_is_plain_and_does_not_flood():
    clock, stream = Clock(), io.StringIO()
    log = LogDisplay(stream, clock)
    for step in range(1000):
        clock.now += 0.1
        log(Progress("indexing", step, 10_000))
    lines = stream.getvalue().splitlines()
    assert 9 <= len(lines) <= 11
    assert lines[-1].startswith("indexing: ")
    assert "10.0/s, 15m" in lines[-1]
    assert "\x1b" not in stream.getvalue()


def test_a_log_shows_finished_shards_soon_but_not_all_of_many():
    clock, stream = Clock(), io.StringIO()
    log = LogDisplay(stream, clock)
    log(Progress("indexing", 0, 10, ShardCounts(0, 10)))
    clock.now += 2
    for finished in range(1, 11):
        log(Progress("indexing", finished, 10, ShardCounts(finished, 10)))
    log(StatusMessage("publishing"))
    assert stream.getvalue().splitlines() == [
        "indexing: 0/10, shards 0/10",
        "indexing: 1/10, shards 1/10",
        "indexing: 10/10, shards 10/10",
        "publishing",
    ]


def test_a_log_shows_the_end_of_every_activity():
    stream = io.StringIO()
    on_progress = progress_callback(LogDisplay(stream, Clock()))
    for activity in ("reading", "scoring"):
        for done in range(5):
            on_progress(activity, done, 4)
    lines = stream.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["reading: 0/4", "reading: 4/4", "scoring: 4/4"]


def test_work_of_an_earlier_run_does_not_enter_the_rate():
    clock, stream = Clock(), io.StringIO()
    log = LogDisplay(stream, clock)
    for done in (5000, 5010, 5020):
        log(Progress("indexing", done, 10_000))
        clock.now += 10
    assert "1.0/s" in stream.getvalue().splitlines()[-1]


def test_a_terminal_shows_the_same_words_in_place():
    stream = Terminal()
    with LiveDisplay(stream) as live:
        for event in (Progress("listing", 10), PLAN, PROGRESS, StatusMessage("publishing \x1b[31m")):
            live(event)
    assert "10,000 inputs in 10 shards" in stream.shown()
    assert "publishing \\x1b[31m" in stream.shown(), "control characters of names are escaped"
    assert "2,048/10,000" in stream.shown()


def test_the_display_fits_the_stream():
    for stream, expected in ((Terminal(), LiveDisplay), (io.StringIO(), LogDisplay)):
        with progress_display(stream=stream) as on_event:
            assert isinstance(on_event, expected)


def test_quiet_shows_nothing():
    for stream in (Terminal(), io.StringIO()):
        with progress_display(quiet=True, stream=stream) as on_event:
            on_event(PLAN)
        assert stream.getvalue() == ""


def test_what_libraries_print_during_a_job_does_not_damage_its_result(capsys):
    with running_job(quiet=True):
        print("a worker died")
    print('{"rows": 3}')
    assert capsys.readouterr() == ('{"rows": 3}\n', "a worker died\n")
