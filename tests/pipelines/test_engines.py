"""The contract of every engine. The tests of the Ray engine share one local Ray."""

import contextlib
import functools
import gc
import time

import pytest

from pipelines.engines import ray_engine
from pipelines.engines.base import (
    TaskFailedError,
    machine_gpus,
    open_engine,
)
from storage_formats.errors import EdjeError
from tests.pipelines.engine_tasks import Job, Report, broken_worker, run_jobs

WORKERS = {"inline": 1, "threads": 2, "ray": 2}


# of each worker; Ray does not look for the GPUs that it is told of
GPUS = 1


@pytest.fixture(scope="module")
def local_ray():
    with ray_engine.connected_ray(
        None, workers=WORKERS["ray"], cpus=1, gpus=GPUS
    ) as cluster:
        yield cluster


@pytest.fixture
def on_ray(local_ray, monkeypatch):
    """`run_on_ray` in a Ray that runs already. test_ray_engine.py tests how an engine
    starts and ends a Ray.
    """
    monkeypatch.setattr(
        ray_engine, "connected_ray", lambda *_, **__: contextlib.nullcontext(local_ray)
    )
    yield functools.partial(ray_engine.run_on_ray, workers=WORKERS["ray"], gpus=GPUS)
    # errors of the run refer to its actors, which occupy the CPUs of the cluster
    gc.collect()


@pytest.fixture(params=["inline", "threads", "ray"])
def engine(request):
    if request.param == "ray":
        return request.getfixturevalue("on_ray")
    return open_engine("inline", WORKERS[request.param])


@pytest.fixture
def workers(request):
    return WORKERS[request.node.callspec.params["engine"]]


def test_every_task_is_done_once_and_reports_its_progress(engine, workers, tmp_path):
    reports = []
    jobs = [Job(1, "report_slowly"), Job(2, "report_slowly"), *map(Job, range(3, 9))]
    assert sorted(
        run_jobs(engine, tmp_path, iter(jobs), on_progress=reports.append)
    ) == list(range(10, 90, 10))
    assert all((tmp_path / str(job.name)).read_text() == "attempt\n" for job in jobs)
    assert 1 <= len(list(tmp_path.glob("worker-*"))) <= workers
    assert all(isinstance(report, Report) for report in reports)
    # a busy machine may ask one of the two workers too late, but not both
    assert reports
    for name in (1, 2):
        steps = [report.step for report in reports if report.name == name]
        assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise_unpicklable", "UnpicklableError: cannot travel"),
        ("fill_disk", "No space left on device: /photos.edje/tokens"),
    ],
)
def test_a_failing_task_is_one_clear_error_with_the_trace_of_the_worker(
    engine, tmp_path, action, message
):
    with pytest.raises(TaskFailedError) as caught:
        list(run_jobs(engine, tmp_path, [Job(3, action)]))
    assert (str(caught.value), caught.value.task) == (message, Job(3, action))
    assert f"in {action}" in caught.value.__notes__[0]


def test_a_worker_that_cannot_be_built_is_one_clear_error(engine):
    ignore = {
        "on_progress": lambda _: None,
        "on_event": lambda _: None,
        "should_stop": lambda: False,
    }
    with pytest.raises(
        EdjeError, match=r"^a worker could not start: RuntimeError: no such weights$"
    ):
        list(engine(broken_worker, [Job(1)], **ignore))
    assert gc.isenabled()


def test_a_stop_reaches_running_tasks_and_begins_no_others(
    engine, workers, tmp_path, request
):
    reports = []
    jobs = [Job(name, "until_stopped") for name in range(6)]
    results = run_jobs(
        engine,
        tmp_path,
        jobs,
        on_progress=reports.append,
        should_stop=lambda: len(reports) > 2,
    )
    started = time.monotonic()
    assert list(results) == []
    assert time.monotonic() - started < 20
    stopped = [path.name for path in tmp_path.glob("stopped-*")]
    begun = [path.name for path in tmp_path.glob("?")]
    assert 1 <= len(begun) <= workers
    # The workers of Ray are killed.
    assert len(stopped) == (0 if "ray" in request.node.name else len(begun))


def test_closing_the_results_ends_the_run(engine, tmp_path):
    results = run_jobs(engine, tmp_path, (Job(name) for name in range(1000)))
    next(results)
    results.close()
    assert len(list(tmp_path.glob("*"))) < 100


def test_the_task_of_a_killed_worker_runs_again_and_one_that_always_kills_fails(
    on_ray, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(ray_engine, "ATTEMPTS", 2)
    jobs = [Job(1, "die_once"), Job(2), Job(3, "die")]
    results = run_jobs(functools.partial(on_ray, workers=1), tmp_path, jobs)
    assert [next(results), next(results)] == [10, 20]
    with pytest.raises(TaskFailedError, match=r"^2 worker processes died") as caught:
        next(results)
    assert caught.value.task == jobs[2]
    assert [(tmp_path / name).read_text().count("attempt") for name in "123"] == [
        2,
        1,
        2,
    ]
    assert capfd.readouterr() == ("", "")


def count_gpus(*_):
    return machine_gpus()


def test_workers_share_the_gpus_of_this_machine(on_ray):
    counts = on_ray(
        lambda: count_gpus,
        [0, 1],
        on_progress=print,
        on_event=print,
        should_stop=lambda: False,
    )
    assert list(counts) == [2, 2]
