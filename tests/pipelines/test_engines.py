"""The contract of every engine, and what the Ray engine adds to it."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines.engines.base import EngineUnavailableError, TaskDone, TaskFailure
from pipelines.engines.inline import InlineEngine
from pipelines.engines.ray_engine import ATTEMPTS, RayEngine
from storage_formats.errors import EdjeError, UsageError
from tests.conftest import REPO
from tests.pipelines.engine_tasks import FileWorker, Job, Report, broken_worker

SET_FOR_RAY = ["PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_TMPDIR"]
WORKERS = {"inline": 1, "ray": 2}


@pytest.fixture(params=["inline", "ray"])
def engine(request):
    return InlineEngine() if request.param == "inline" else RayEngine(WORKERS["ray"])


@pytest.fixture(autouse=True)
def nothing_left_behind():
    processes = set(psutil.Process().children(recursive=True))  # such as the resource tracker of multiprocessing
    variables = {name: os.environ.get(name) for name in SET_FOR_RAY}
    yield
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert leftover_folders(os.getpid()) == []
    assert {name: os.environ.get(name) for name in SET_FOR_RAY} == variables


def run(engine, folder, jobs, *, on_progress=lambda _: None, should_stop=lambda: False):
    """Outcomes of `jobs` on workers that leave their traces in `folder`."""
    make_worker = functools.partial(FileWorker, str(folder))
    return engine.run(make_worker, jobs, on_progress=on_progress, should_stop=should_stop)


def test_every_task_is_done_once_and_taken_only_when_a_worker_is_free(engine, tmp_path):
    taken, done, waiting = 0, 0, []

    def jobs():
        nonlocal taken
        for name in range(9):
            taken += 1
            waiting.append(taken - done)
            yield Job(name)

    outcomes = []
    for outcome in run(engine, tmp_path, jobs()):
        done += 1
        outcomes.append(outcome)
    assert sorted(outcomes, key=lambda outcome: outcome.task.name) == [TaskDone(Job(n), n * 10) for n in range(9)]
    assert all((tmp_path / str(name)).read_text() == "attempt\n" for name in range(9))
    assert max(waiting) <= WORKERS[engine.name]
    assert 1 <= len(list(tmp_path.glob("worker-*"))) <= WORKERS[engine.name]


def test_progress_arrives_while_tasks_run(engine, tmp_path):
    reports = []
    outcomes = list(
        run(engine, tmp_path, [Job(1, "report_slowly"), Job(2, "report_slowly")], on_progress=reports.append)
    )
    assert len(outcomes) == 2
    assert {report.name for report in reports} == {1, 2}
    assert all(isinstance(report, Report) for report in reports)
    for name in (1, 2):
        steps = [report.step for report in reports if report.name == name]
        assert steps == sorted(steps)


def test_a_failing_task_is_an_outcome_and_the_others_go_on(engine, tmp_path):
    actions = ["raise_value_error", "raise_unpicklable", "fill_disk", "succeed"]
    outcomes = {o.task.action: o for o in run(engine, tmp_path, [Job(n, action) for n, action in enumerate(actions)])}
    assert outcomes["raise_value_error"].message == "ValueError: two lines"
    assert outcomes["raise_unpicklable"].message == "UnpicklableError: cannot travel"
    assert outcomes["fill_disk"].message == "No space left on device: /photos.edje/tokens"
    assert outcomes["succeed"] == TaskDone(Job(3), 30)
    assert "in raise_value_error" in outcomes["raise_value_error"].trace


def test_a_worker_that_cannot_be_built_is_one_clear_error(engine):
    outcomes = engine.run(broken_worker, [Job(1)], on_progress=lambda _: None, should_stop=lambda: False)
    with pytest.raises(EdjeError, match=r"^a worker could not start: RuntimeError: no such weights$"):
        list(outcomes)


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_a_task_that_is_not_known_yet_holds_up_no_other(engine, tmp_path):
    outcomes = []

    def jobs():
        for name in range(3):
            yield None
            yield Job(name)
            deadline = time.monotonic() + 60
            while len(outcomes) <= name and time.monotonic() < deadline:
                yield None
        yield from itertools.repeat(None)

    for outcome in run(engine, tmp_path, jobs(), should_stop=lambda: len(outcomes) == 3):
        outcomes.append(outcome)
    assert outcomes == [TaskDone(Job(name), name * 10) for name in range(3)]
    assert len(list(tmp_path.glob("worker-*"))) == 1, "the worker waits for the next task"


def test_no_tasks_are_no_outcomes(engine, tmp_path):
    assert list(run(engine, tmp_path, [])) == []


def test_a_stop_reaches_running_tasks_and_begins_no_others(engine, tmp_path):
    reports = []
    jobs = [Job(name, "until_stopped") for name in range(6)]
    outcomes = run(engine, tmp_path, jobs, on_progress=reports.append, should_stop=lambda: len(reports) > 2)
    started = time.monotonic()
    assert list(outcomes) == []
    assert time.monotonic() - started < 20
    stopped = [path.name for path in tmp_path.glob("stopped-*")]
    begun = [path.name for path in tmp_path.glob("?")]
    assert 1 <= len(stopped) == len(begun) <= WORKERS[engine.name]


def test_closing_the_outcomes_ends_the_run(engine, tmp_path):
    outcomes = run(engine, tmp_path, (Job(name) for name in range(1000)))
    next(outcomes)
    outcomes.close()
    assert len(list(tmp_path.glob("*"))) < 100


def test_ray_runs_the_task_of_a_killed_worker_again_and_gives_up_on_one_that_always_kills(tmp_path, capfd):
    jobs = [Job(1, "die_once"), Job(2, "die"), Job(3), Job(4), Job(5, "return_unpicklable")]
    outcomes = {outcome.task.name: outcome for outcome in run(RayEngine(2), tmp_path, jobs)}
    assert [outcomes[name] for name in (1, 3, 4)] == [TaskDone(jobs[0], 10), TaskDone(Job(3), 30), TaskDone(Job(4), 40)]
    assert isinstance(outcomes[2], TaskFailure)
    assert f"{ATTEMPTS} worker processes died" in outcomes[2].message
    assert (tmp_path / "2").read_text().count("attempt") == ATTEMPTS
    assert isinstance(outcomes[5], TaskFailure)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop_once", "read_fifo_once"])
def test_ray_replaces_a_worker_that_hangs(tmp_path, action):
    jobs = [Job(1, action), Job(2), Job(3)]
    outcomes = {outcome.task.name: outcome for outcome in run(RayEngine(2, stall_seconds=8), tmp_path, jobs)}
    assert outcomes == {job.name: TaskDone(job, job.name * 10) for job in jobs}
    assert (tmp_path / "1").read_text().count("attempt") == 2


@pytest.mark.slow
def test_ray_gives_up_on_a_task_that_always_hangs_and_waits_for_a_slow_one(tmp_path):
    jobs = [Job(1, "stop"), Job(2, "report_for_long")]
    outcomes = {outcome.task.name: outcome for outcome in run(RayEngine(2, stall_seconds=4), tmp_path, jobs)}
    assert "made no progress for 4s" in outcomes[1].message
    assert (tmp_path / "1").read_text().count("attempt") == ATTEMPTS
    assert outcomes[2] == TaskDone(jobs[1], 20)
    assert (tmp_path / "2").read_text().count("attempt") == 1


@pytest.mark.slow
def test_workers_have_not_stalled_if_the_driver_pauses(tmp_path):
    for outcome in run(RayEngine(2, stall_seconds=4), tmp_path, [Job(1, "report_for_long"), Job(2), Job(3)]):
        if outcome.task.name != 1:
            time.sleep(5)
    assert (tmp_path / "1").read_text().count("attempt") == 1


@pytest.mark.parametrize("victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
def test_the_death_of_ray_is_one_clear_error_in_bounded_time(tmp_path, capfd, victim):
    killed_at = None

    def kill(_report):
        nonlocal killed_at
        if killed_at is None:
            killed_at = time.monotonic()
            next(child for child in psutil.Process().children(recursive=True) if child.name() == victim).kill()

    outcomes = run(RayEngine(1), tmp_path, [Job(1, "until_stopped")], on_progress=kill)
    with pytest.raises(EdjeError, match=f"^Ray ended during the run: its {victim} process is gone"):
        list(outcomes)
    assert time.monotonic() - killed_at < 20
    assert capfd.readouterr() == ("", "")


def test_a_local_ray_is_private(tmp_path, monkeypatch):
    """It listens on the loopback interface, asks for a token, and nobody else can enter its folder."""
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # of another cluster, which a local Ray must not join
    addresses, environments = set(), []

    def look(_report):
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            addresses.update(c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN)
            if process.name() == "raylet":
                folder = Path(process.environ()["RAY_TMPDIR"])
                environments.append((process.environ()["RAY_AUTH_MODE"], folder.stat().st_mode & 0o777))

    list(run(RayEngine(1), tmp_path, [Job(1, "report_slowly")], on_progress=look))
    assert addresses
    assert all(address.endswith("127.0.0.1") for address in addresses)
    assert set(environments) == {("token", 0o700)}


def test_ray_addresses_that_cannot_be_joined_are_refused(tmp_path):
    with pytest.raises(UsageError, match="host:port"):
        RayEngine(1, address="ray://head:10001")
    with pytest.raises(
        EngineUnavailableError, match=r"cannot join the Ray cluster at 127\.0\.0\.1:1: Connection refused"
    ):
        list(run(RayEngine(1, address="127.0.0.1:1"), tmp_path, [Job(1)]))


def with_repo_on_path():
    return {**os.environ, "PYTHONPATH": str(REPO)}


ENDLESS = """
import functools, sys
from pipelines.engines.ray_engine import RayEngine
from tests.pipelines.engine_tasks import FileWorker, Job

make_worker = functools.partial(FileWorker, sys.argv[1])
list(RayEngine(1).run(make_worker, [Job(1, "until_stopped")], on_progress=print, should_stop=bool))
"""


def test_a_killed_driver_takes_ray_and_its_folder_along(tmp_path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=with_repo_on_path()) as driver:
        assert b"Report" in driver.stdout.readline()
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert len(processes) > 5
        driver.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (alive(processes) or leftover_folders(driver.pid)):
        time.sleep(0.1)
    assert alive(processes) == []
    assert leftover_folders(driver.pid) == []


def alive(processes):
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def leftover_folders(driver_pid):
    return list(Path("/tmp").glob(f"edje-ray-{driver_pid}-*"))


IMPORTED_EARLY = """
import ray
from pipelines.engines.ray_engine import RayEngine

list(RayEngine(1).run(list, [], on_progress=print, should_stop=bool))
"""


def test_a_ray_that_was_imported_with_open_settings_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_EARLY], capture_output=True, text=True, env=with_repo_on_path(), check=False
    )
    assert done.returncode == 1
    assert "set RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before you import ray" in done.stderr
