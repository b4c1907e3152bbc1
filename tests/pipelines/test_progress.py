"""Displays of events."""

from __future__ import annotations

import io
import re

from pipelines.progress.display import LogDisplay, describe_plan, describe_progress, progress_display
from pipelines.progress.events import Planning, PlanReady, Progress, ShardDone, StatusMessage

PROGRESS = Progress(2048, 10_000, 2, 10, 3, 41.25, 193.0, "decode")
PLAN = PlanReady(10_000, 12, 10, 2, {".txt": 5, ".xml": 1}, 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_words():
    assert describe_progress(PROGRESS) == (
        "2,048/10,000 images, 41.2 images/s, shards 2/10, failed 3, 3m13s left, bottleneck decode"
    )


def test_plan_in_words():
    assert describe_plan(PLAN) == [
        "10,000 inputs in 10 shards, 1 worker",
        "12 inputs are byte-identical to another and will be encoded once",
        "ignored 6 files that are no images: .txt 5, .xml 1",
        "resuming: 2 of 10 shards are finished",
    ]


def test_a_log_is_plain_and_does_not_flood():
    now = 0.0
    stream = io.StringIO()
    log = LogDisplay(stream, clock=lambda: now)
    for step in range(1000):
        now = step * 0.1
        log(PROGRESS)
    lines = stream.getvalue().splitlines()
    assert 9 <= len(lines) <= 11
    assert "\x1b" not in stream.getvalue()


def test_a_log_shows_ends_of_shards_at_once_but_not_all_of_many():
    now = 0.0
    stream = io.StringIO()
    log = LogDisplay(stream, clock=lambda: now)
    log(PROGRESS)
    now = 2.0
    for _ in range(5):
        log(ShardDone(1, PROGRESS))
    log(StatusMessage("publishing"))
    assert stream.getvalue().splitlines()[1:] == [describe_progress(PROGRESS), "publishing"]


def test_a_terminal_shows_the_same_words_in_place():
    stream = Terminal()
    with progress_display(stream=stream) as on_event:
        for event in (Planning(10), PLAN, PROGRESS, ShardDone(1, PROGRESS), StatusMessage("publishing")):
            on_event(event)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "10,000 inputs in 10 shards" in shown
    assert "publishing" in shown


def test_quiet_shows_nothing():
    for stream in (Terminal(), io.StringIO()):
        with progress_display(quiet=True, stream=stream) as on_event:
            on_event(PLAN)
        assert stream.getvalue() == ""
