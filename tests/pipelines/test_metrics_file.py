"""Metrics of a job in a file. The parser of the Prometheus client reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelines import delete_rows
from pipelines.jobs.build import run_build
from pipelines.progress.event_log import event_log
from pipelines.progress.events import FinishedShard, PlanReady, Progress, ShardCounts
from pipelines.progress.metrics_file import STATES, JobMetrics, metrics_file
from pipelines.progress.stopping import JobStopped, StopFlag
from storage_formats import IndexSpec
from storage_formats.errors import UsageError
from tests.conftest import write_random_index
from tests.pipelines.test_event_log import Clock, lines


def samples(path: Path) -> dict[tuple[str, str], float]:
    """Values by name without prefix, and by the label that is neither the command nor the index."""
    families = text_string_to_metric_families(path.read_text())
    read = [sample for family in families for sample in family.samples]
    labels = [dict(sample.labels) for sample in read]
    assert {(each.pop("command"), each.pop("index")) for each in labels} == {("build", "a.edje")}
    values = ["".join(each.values()) for each in labels]
    return {(each.name.removeprefix("edje_job_"), label): each.value for each, label in zip(read, values, strict=True)}


def test_a_build_and_its_dry_run_write_metrics_and_log(run, photos, tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fixed = ["--engine", "inline", "--shard-size", 4, "--batch-size", 2, "--threads", 1, "--device", "cpu", "--quiet"]
    build = ["build", photos, "--out", "a.edje", "--model", tiny_bundle, *fixed, "--metrics", "a.prom", "--log", "log"]
    assert run(*build, "--dry-run")[0] == 0
    assert samples(tmp_path / "a.prom")["state", "finished"] == 1
    assert lines(tmp_path / "log")[-1]["event"] == "end"
    assert "images to estimate the time" in (tmp_path / "log").read_text()
    assert not (tmp_path / "a.edje").exists()
    assert run(*build)[0] == 0
    values = samples(tmp_path / "a.prom")
    assert [values["state", state] for state in STATES] == [0, 1, 0, 0]
    assert (values["done", "indexing"], values["total", "indexing"]) == (10, 10)
    assert (values["shards_finished", ""], values["shards_total", ""], values["failed_rows", ""]) == (3, 3, 1)
    assert values["stage_seconds", "encode"] > 0
    assert values["start_seconds", ""] > 1.7e9
    assert [path.name for path in tmp_path.glob("a.prom*")] == ["a.prom"]


@pytest.mark.parametrize(
    ("arguments", "index"),
    [
        (["compact", "a"], "a"),
        (["merge", "a", "b", "--out", "c"], "c"),
        (["copy", "a", "c"], "c"),
        (["repair", "a"], "a"),
    ],
)
def test_the_commands_without_a_model_write_metrics_and_log(run, tmp_path, monkeypatch, arguments, index):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_random_index(tmp_path / name, IndexSpec(rows=16, shard_size=8, block_shape=(2, 8), embed_dim=4))
    delete_rows("a", rows=[1])
    code, _, error = run(*arguments, "--quiet", "--metrics", "m.prom", "--log", "log")
    assert code == 0, error
    finished = f'edje_job_state{{command="{arguments[0]}",index="{index}",state="finished"}} 1.0'
    assert finished in (tmp_path / "m.prom").read_text()
    assert 'edje_job_done{activity="' in (tmp_path / "m.prom").read_text()
    events = [line["event"] for line in lines(tmp_path / "log")]
    assert (events[0], events[-1]) == ("start", "end")
    assert "progress" in events


def test_the_file_is_replaced_every_ten_seconds(tmp_path):
    clock, path = Clock(), tmp_path / "a.prom"
    metrics = JobMetrics(path, "build", "a.edje", clock)
    metrics(PlanReady(30, 3, finished_shards=1))
    for step in range(1, 250):
        clock.now += 0.125
        shard = FinishedShard(step, 1, 0, {"encode": 0.5})
        metrics(Progress("indexing", step, None, ShardCounts(2, 3, 1), shard))
        values = samples(path)
        written = step // 80 * 80
        assert values.get(("done", "indexing"), 0) == written
        assert values.get(("stage_seconds", "encode"), 0) == written * 0.5
    assert ("total", "indexing") not in values
    assert values["state", "running"] == 1


@pytest.mark.parametrize(
    ("error", "cause", "state"),
    [
        (JobStopped("x"), None, "stopped"),
        (JobStopped("x; 1 of 2 rows are kept"), JobStopped("x"), "stopped"),
        (KeyboardInterrupt(), None, "stopped"),
        (JobStopped("x"), OSError(5, "x"), "failed"),
        (OSError(5, "x"), None, "failed"),
    ],
)
def test_the_state_says_how_a_job_ended(tmp_path, error, cause, state):
    with (
        pytest.raises(type(error)),
        metrics_file(tmp_path / "a.prom", "build", "a.edje"),
        event_log(tmp_path / "log", "edje-index build"),
    ):
        raise error from cause
    assert samples(tmp_path / "a.prom")["state", state] == 1
    assert lines(tmp_path / "log")[-1]["status"] == state


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_the_state_of_a_build_that_ends_early(config, tmp_path, state):
    """The disk is full after the first shard, or a stop is requested then. Both raise JobStopped."""
    stop = StopFlag()

    def on_event(event):
        if isinstance(event, Progress) and event.finished_shard is not None:
            stop.set()
            if state == "failed":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(JobStopped, match="rows are kept"), metrics_file(tmp_path / "a.prom", "build", "a.edje"):
        run_build(config(), on_event, stop)
    assert samples(tmp_path / "a.prom")["state", state] == 1


@pytest.mark.parametrize("arguments", [["append", "photos"], ["append", "photos", "--dry-run"], ["retry-failed"]])
def test_a_job_that_cannot_begin_has_failed(run, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    url = "http://user@host/a.edje"
    name, *others = arguments
    code, _, error = run(name, url, *others, "--quiet", "--metrics", "a.prom", "--log", "log")
    assert code == 2, error
    assert 'state="failed"} 1.0' in (tmp_path / "a.prom").read_text()
    assert lines(tmp_path / "log")[-1]["status"] == "failed"


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    with (
        pytest.raises(UsageError, match=r"cannot write the metrics .*nowhere/a\.prom: No such file.*choose another"),
        metrics_file(tmp_path / "nowhere/a.prom", "build", "a.edje"),
    ):
        pass
    folder = tmp_path / "vanishing"
    folder.mkdir()
    with metrics_file(folder / "a.prom", "build", "s3://key:secret@bucket/a.edje"):
        assert "secret" not in (folder / "a.prom").read_text()
        (folder / "a.prom").unlink()
        folder.rmdir()
    assert capsys.readouterr().err.count("the job goes on") == 1
