"""The contract of every engine. The tests of the Ray engine share one local Ray."""

from __future__ import annotations

import contextlib
import time

import pytest

from pipelines.engines import ray_engine
from pipelines.engines.base import InlineEngine, TaskDone
from pipelines.engines.ray_engine import RayEngine, connected_ray
from storage_formats.errors import EdjeError
from tests.pipelines.engine_tasks import Job, Report, broken_worker, run_jobs

WORKERS = {"inline": 1, "ray": 2}


@pytest.fixture(scope="module")
def local_ray():
    with connected_ray(None, cpus=WORKERS["ray"], gpus=0) as cluster:
        yield cluster


@pytest.fixture(params=["inline", "ray"])
def engine(request, monkeypatch):
    if request.param == "inline":
        return InlineEngine()
    cluster = request.getfixturevalue("local_ray")  # test_ray_engine.py tests how an engine starts and ends a Ray
    monkeypatch.setattr(ray_engine, "connected_ray", lambda *_, **__: contextlib.nullcontext(cluster))
    return RayEngine(WORKERS["ray"])


def test_every_task_is_done_once(engine, tmp_path):
    outcomes = list(run_jobs(engine, tmp_path, (Job(name) for name in range(9))))
    assert sorted(outcomes, key=lambda outcome: outcome.task.name) == [TaskDone(Job(n), n * 10) for n in range(9)]
    assert all((tmp_path / str(name)).read_text() == "attempt\n" for name in range(9))
    assert 1 <= len(list(tmp_path.glob("worker-*"))) <= WORKERS[engine.name]


def test_progress_arrives_while_tasks_run(engine, tmp_path):
    reports = []
    outcomes = list(
        run_jobs(engine, tmp_path, [Job(1, "report_slowly"), Job(2, "report_slowly")], on_progress=reports.append)
    )
    assert len(outcomes) == 2
    assert {report.name for report in reports} == {1, 2}
    assert all(isinstance(report, Report) for report in reports)
    for name in (1, 2):
        steps = [report.step for report in reports if report.name == name]
        assert steps == sorted(steps)


def test_a_failing_task_is_an_outcome_and_the_others_go_on(engine, tmp_path):
    actions = ["raise_value_error", "raise_unpicklable", "fill_disk", "succeed"]
    jobs = [Job(name, action) for name, action in enumerate(actions)]
    outcomes = {outcome.task.action: outcome for outcome in run_jobs(engine, tmp_path, jobs)}
    assert outcomes["raise_value_error"].message == "ValueError: two lines"
    assert outcomes["raise_unpicklable"].message == "UnpicklableError: cannot travel"
    assert outcomes["fill_disk"].message == "No space left on device: /photos.edje/tokens"
    assert outcomes["succeed"] == TaskDone(Job(3), 30)
    assert "in raise_value_error" in outcomes["raise_value_error"].trace


def test_a_worker_that_cannot_be_built_is_one_clear_error(engine):
    outcomes = engine.run(broken_worker, [Job(1)], on_progress=lambda _: None, should_stop=lambda: False)
    with pytest.raises(EdjeError, match=r"^a worker could not start: RuntimeError: no such weights$"):
        list(outcomes)


def test_no_tasks_are_no_outcomes(engine, tmp_path):
    assert list(run_jobs(engine, tmp_path, [])) == []


def test_a_stop_reaches_running_tasks_and_begins_no_others(engine, tmp_path):
    reports = []
    jobs = [Job(name, "until_stopped") for name in range(6)]
    outcomes = run_jobs(engine, tmp_path, jobs, on_progress=reports.append, should_stop=lambda: len(reports) > 2)
    started = time.monotonic()
    assert list(outcomes) == []
    assert time.monotonic() - started < 20
    stopped = [path.name for path in tmp_path.glob("stopped-*")]
    begun = [path.name for path in tmp_path.glob("?")]
    assert 1 <= len(stopped) == len(begun) <= WORKERS[engine.name]


def test_closing_the_outcomes_ends_the_run(engine, tmp_path):
    outcomes = run_jobs(engine, tmp_path, (Job(name) for name in range(1000)))
    next(outcomes)
    outcomes.close()
    assert len(list(tmp_path.glob("*"))) < 100
