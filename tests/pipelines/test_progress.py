"""Displays and logs of events, and sizes in words."""

import io
import json
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from pipelines.cli.output import run_job
from pipelines.progress.display import Display, log_file
from pipelines.progress.events import (
    JobStopped,
    PlanReady,
    Progress,
    StatusMessage,
    bottleneck,
)
from tests.pipelines.conftest import INLINE

PROGRESS = Progress("indexing", 2048, 10_000, 10, 2, 3, "decode")
PLAN = PlanReady(10_000, 10, 2, 1, 12, {".txt": 5, ".xml": 1})


def unlogged(*event, **members):
    pass


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


def test_plain_lines_do_not_flood():
    clock = Clock()
    stream = io.StringIO()
    show = Display(stream, unlogged, clock=clock)
    for step in range(1000):
        clock.now += 0.1
        show(Progress("indexing", step, 10_000))
    lines = stream.getvalue().splitlines()
    assert 9 <= len(lines) <= 11
    assert lines[-1].startswith("indexing: ")
    assert "10.0/s, left 0:15:" in lines[-1]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_shows_the_same_words_in_place():
    stream = Terminal()
    live = Display(stream, unlogged)
    with live.bar:
        live(Progress("listing", 10))
        live(PLAN)
        live(PROGRESS)
        # control characters of names are escaped
        live(StatusMessage("publishing \x1b[31m"))
    assert "plan: inputs 10,000, shards 10, finished shards 2," in stream.shown()
    assert "publishing \\x1b[31m" in stream.shown()

    assert "2,048/10,000" in stream.shown()


def test_what_libraries_print_during_a_job_does_not_damage_its_result(capsys):
    run_job(print, "a worker died")
    print('{"rows": 3}')
    assert capsys.readouterr() == ('{"rows": 3}\n', "a worker died\n")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_build_is_logged_and_the_next_run_appends(run, photos, tiny_bundle, tmp_path):
    log = tmp_path / "build.jsonl"
    out = ["--out", tmp_path / "index", "--model", tiny_bundle]
    build = ["--log", log, "build", photos, *out, *INLINE]
    run.ok(*build)
    events = lines(log)
    assert events[0]["event"] == "start"
    (plan,) = (event for event in events if event["event"] == "plan")
    assert (plan["inputs"], plan["shards"], plan["ignored"]) == (10, 3, {".txt": 1})
    shards = [event for event in events if event["event"] == "shard"]
    assert [each["failed"] for each in shards] == [0, 1, 0]
    stages = {"read", "decode", "helpers", "wait", "encode", "write"}
    assert all(stages == set(each["stage_seconds"]) for each in shards)
    *_, last = (event for event in events if event.get("activity") == "indexing")
    assert (last["done"], last["finished_shards"], last["failed"]) == (10, 3, 1)
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "finished")
    times = [datetime.fromisoformat(event["time"]) for event in events]
    assert times == sorted(times)
    run.ok(*build)
    again = lines(log)
    assert again[: len(events)] == events
    assert [event["event"] for event in again[len(events) :]] == ["start", "end"]


def test_the_end_says_how_a_run_ended(tmp_path):
    log = tmp_path / "log"
    for error, status, level in (
        (JobStopped("stopped"), "stopped", "warning"),
        (KeyboardInterrupt(), "stopped", "warning"),
        (OSError(5, "x"), "failed", "error"),
    ):
        with pytest.raises(type(error)), log_file(log, "edje-index build"):
            raise error
        assert (lines(log)[-1]["status"], lines(log)[-1]["level"]) == (status, level)
        assert lines(log)[-1]["error"]


def test_a_log_that_cannot_be_opened_is_wrong_usage(run, tmp_path):
    log = tmp_path / "absent" / "log"
    err = run.refused("--log", log, "append", tmp_path, "photos")
    assert "--log: cannot write the log" in err


def test_a_full_disk_ends_the_log_and_not_the_job(capsys):
    with log_file(Path("/dev/full"), "edje-index build") as log:
        on_event = Display(sys.stderr, log, quiet=True)
        on_event(StatusMessage("publishing"))
        on_event(PLAN)
    error = "cannot write the log /dev/full: No space left on device"
    assert capsys.readouterr().err.count(error) == 1


def test_passwords_in_urls_are_left_out(tmp_path):
    command = "edje-index build https://{}@host/a.tar hf://owner/set@v1 --out a@b"
    with log_file(tmp_path / "log", command.format("user:secret")):
        pass
    assert lines(tmp_path / "log")[0]["command"] == command.format("...")


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ({"wait": 6, "encode": 2, "read": 9, "decode": 3, "helpers": 16}, "read"),
        ({"wait": 6, "encode": 2, "read": 3, "decode": 9, "helpers": 16}, "decode"),
        ({"wait": 1, "encode": 2, "write": 5, "decode": 12, "helpers": 16}, "write"),
    ],
)
def test_a_build_says_what_limits_it(seconds, limit):
    assert bottleneck(seconds) == limit
    assert bottleneck({}) is None
