"""The log file of a job."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from pathlib import Path

import pytest

from pipelines.progress.event_log import EventLog, event_log
from pipelines.progress.events import LEVELS, FinishedShard, PlanReady, Progress, StatusMessage
from pipelines.progress.stopping import JobStopped
from storage_formats.errors import CorruptIndexError, UsageError


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_build_is_logged_and_the_next_run_appends(run, photos, tiny_bundle, tmp_path):
    log, index = tmp_path / "build.jsonl", tmp_path / "index"
    fixed = ["--engine", "inline", "--shard-size", 4, "--batch-size", 2, "--threads", 1, "--device", "cpu", "--quiet"]
    build = ["build", photos, "--out", index, "--model", tiny_bundle, *fixed, "--log", log]
    assert run(*build)[0] == 0
    events = lines(log)
    assert [event["event"] for event in events][:1] == ["start"]
    (plan,) = (event for event in events if event["event"] == "plan")
    assert (plan["inputs"], plan["shards"], plan["ignored"]) == (10, 3, {".txt": 1})
    shards = [event for event in events if event["event"] == "shard"]
    assert [(each["shard"], each["rows"], each["failed"]) for each in shards] == [(0, 4, 0), (1, 4, 1), (2, 2, 0)]
    assert all({"read", "decode", "wait", "encode", "write"} == set(each["stage_seconds"]) for each in shards)
    (failed,) = (event for event in events if event["event"] == "failed")
    assert (failed["row_id"], failed["uri"], failed["reason"]) == (7, str(photos / "07.jpg"), "not-an-image")
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "finished")
    times = [datetime.fromisoformat(event["time"]) for event in events]
    assert times == sorted(times)
    assert times[0].utcoffset().total_seconds() == 0
    assert {event["level"] for event in events if event["event"] != "failed"} == {"info"}
    assert run(*build)[0] == 0
    assert lines(log)[: len(events)] == events
    assert [event["event"] for event in lines(log)[len(events) :]] == ["start", "end"]


def test_the_end_says_how_a_run_ended(tmp_path):
    log = tmp_path / "log"
    for error, status in (
        (JobStopped("stopped"), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (OSError(5, "x"), "failed"),
    ):
        with pytest.raises(type(error)), event_log(log, "edje-index build"):
            raise error
        assert lines(log)[-1]["status"] == status
        assert lines(log)[-1]["error"]


def test_progress_does_not_flood_the_log(tmp_path):
    clock = Clock()
    with (tmp_path / "log").open("wb", buffering=0) as file:
        log = EventLog(file, clock=clock)
        for step in range(1001):
            clock.now += 0.1
            log(Progress("indexing", step, 1000))
        log(Progress("merging", 1, 5))
    progress = lines(tmp_path / "log")
    assert 10 <= len(progress) <= 13
    assert [(each["activity"], each["done"]) for each in progress[-2:]] == [("indexing", 1000), ("merging", 1)]


def test_a_level_leaves_out_events_below_it(tmp_path):
    clock = Clock()
    written = {}
    for level in LEVELS:
        with (tmp_path / level).open("wb", buffering=0) as file:
            log = EventLog(file, lambda shard: [{"row_id": 7}], clock=clock, level=level)
            log(PlanReady(8, 2))
            log(StatusMessage("publishing"))
            log(StatusMessage("a node was lost", is_warning=True))
            for done in (1, 2, 3):
                log(Progress("indexing", done, 8))
            log(Progress("indexing", 4, 8, finished_shard=FinishedShard(0, 4, 1, {})))
        written[level] = [(event["event"], event["level"]) for event in lines(tmp_path / level)]
    warnings = [("message", "warning"), ("failed", "warning")]
    assert written["error"] == []
    assert written["warning"] == warnings
    assert [event for event in written["info"] if event not in warnings] == [
        ("plan", "info"), ("message", "info"), ("progress", "info"), ("shard", "info")
    ]  # fmt: skip
    assert [event for event in written["debug"] if event not in written["info"]] == [("progress", "debug")] * 3


@pytest.mark.parametrize(
    ("error", "lowest"), [(None, "info"), (JobStopped("stopped"), "warning"), (OSError(5, "x"), "error")]
)
def test_the_level_of_the_end_says_how_the_run_ended(tmp_path, error, lowest):
    for level in LEVELS:
        with contextlib.suppress(JobStopped, OSError), event_log(tmp_path / level, "edje-index build", level=level):
            if error is not None:
                raise error
        ends = [event["level"] for event in lines(tmp_path / level) if event["event"] == "end"]
        assert ends == ([lowest] if LEVELS.index(level) <= LEVELS.index(lowest) else [])


def test_a_build_logs_only_what_the_level_asks_for(run, photos, tiny_bundle, tmp_path):
    log, index = tmp_path / "build.jsonl", tmp_path / "index"
    build = ["build", photos, "--out", index, "--model", tiny_bundle, "--engine", "inline", "--quiet"]
    code, _, err = run(*build, "--log-level", "warning")
    assert code == 2
    assert "name the file of the log with --log" in err
    assert not index.exists()
    assert run(*build, "--log", log, "--log-level", "warning")[0] == 0
    assert [(event["event"], event["uri"]) for event in lines(log)] == [("failed", str(photos / "07.jpg"))]
    (tmp_path / "edje.toml").write_text(f"[append]\nlog = '{log}'\nlog-level = 'error'\n")
    log.unlink()
    append = ["append", index, photos, "--engine", "inline", "--quiet"]
    assert run("--defaults", tmp_path / "edje.toml", *append)[0] == 0
    assert lines(log) == []


def test_a_log_that_cannot_be_opened_is_wrong_usage(run, tmp_path):
    with pytest.raises(UsageError, match="cannot write the log"), event_log(tmp_path / "absent" / "log", "build"):
        pass
    code, _, err = run("append", tmp_path, "photos", "--log", tmp_path / "absent" / "log")
    assert code == 2
    assert "--log: cannot write the log" in err


def test_a_full_disk_ends_the_log_and_not_the_job(capsys):
    with event_log(Path("/dev/full"), "edje-index build") as log:
        log(StatusMessage("publishing"))
        log(PlanReady(1, 1))
    assert capsys.readouterr().err.count("cannot write the log /dev/full: No space left on device") == 1


def test_failed_rows_that_cannot_be_read_are_said(tmp_path):
    def failures(shard):
        raise CorruptIndexError("rows/3.parquet is missing")

    with (tmp_path / "log").open("wb", buffering=0) as file:
        EventLog(file, failures)(Progress("indexing", 4, 8, finished_shard=FinishedShard(3, 4, 1, {})))
    shard, message, _ = lines(tmp_path / "log")
    assert shard["shard"] == 3
    assert "rows/3.parquet is missing" in message["text"]


def test_passwords_in_urls_are_left_out(tmp_path):
    with event_log(tmp_path / "log", "edje-index build https://user:secret@host/a.tar hf://owner/set@v1 --out a@b"):
        pass
    start = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert start["command"] == "edje-index build https://...@host/a.tar hf://owner/set@v1 --out a@b"
