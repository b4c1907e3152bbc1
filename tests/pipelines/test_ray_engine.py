"""What the Ray engine adds to the contract of the engines. Each test starts a Ray of its own and sees it end."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines.engines.base import EngineUnavailableError, Notice, TaskDone, TaskFailure
from pipelines.engines.ray_engine import ATTEMPTS, RayEngine
from storage_formats.errors import EdjeError, UsageError
from tests.conftest import REPO
from tests.pipelines.engine_tasks import Job, run_jobs

SET_FOR_RAY = ["PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_TMPDIR"]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    processes = set(psutil.Process().children(recursive=True))  # such as the resource tracker of multiprocessing
    variables = {name: os.environ.get(name) for name in SET_FOR_RAY}
    yield
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert leftover_folders(os.getpid()) == []
    assert {name: os.environ.get(name) for name in SET_FOR_RAY} == variables


def by_name(items):
    """The outcomes among `items`, by the name of the task."""
    return {item.task.name: item for item in items if not isinstance(item, Notice)}


def test_ray_runs_the_task_of_a_killed_worker_again_and_gives_up_on_one_that_always_kills(tmp_path, capfd):
    jobs = [Job(1, "die_once"), Job(2, "die"), Job(3), Job(4), Job(5, "return_unpicklable")]
    run = run_jobs(RayEngine(2), tmp_path, [*jobs, Job(6, "wait_for_go")])
    outcomes = {outcome.task.name: outcome for outcome in itertools.islice(run, len(jobs))}
    run.close()  # ends the worker that waits
    assert [outcomes[name] for name in (1, 3, 4)] == [TaskDone(jobs[0], 10), TaskDone(Job(3), 30), TaskDone(Job(4), 40)]
    assert isinstance(outcomes[2], TaskFailure)
    assert f"at least {ATTEMPTS + 1} worker processes died" in outcomes[2].message
    assert ATTEMPTS < (tmp_path / "2").read_text().count("attempt") <= 2 * ATTEMPTS
    assert isinstance(outcomes[5], TaskFailure)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop_once", "read_fifo_once"])
def test_ray_replaces_a_worker_that_hangs(tmp_path, action):
    jobs = [Job(1, action), Job(2), Job(3)]
    outcomes = by_name(run_jobs(RayEngine(2, stall_seconds=8), tmp_path, jobs))
    assert outcomes == {job.name: TaskDone(job, job.name * 10) for job in jobs}
    assert (tmp_path / "1").read_text().count("attempt") == 2


@pytest.mark.slow
def test_ray_gives_up_on_a_task_that_always_hangs_and_waits_for_a_slow_one(tmp_path):
    jobs = [Job(1, "stop"), Job(2, "report_for_long")]
    outcomes = by_name(run_jobs(RayEngine(2, stall_seconds=4), tmp_path, jobs))
    assert "made no progress for 4s" in outcomes[1].message
    assert ATTEMPTS < (tmp_path / "1").read_text().count("attempt") <= 2 * ATTEMPTS
    assert outcomes[2] == TaskDone(jobs[1], 20)
    assert (tmp_path / "2").read_text().count("attempt") == 1


@pytest.mark.slow
def test_workers_have_not_stalled_if_the_driver_pauses(tmp_path):
    for outcome in run_jobs(RayEngine(2, stall_seconds=4), tmp_path, [Job(1, "report_for_long"), Job(2), Job(3)]):
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

    outcomes = run_jobs(RayEngine(1), tmp_path, [Job(1, "until_stopped")], on_progress=kill)
    with pytest.raises(EdjeError, match=f"^Ray ended during the run: its {victim} process is gone"):
        list(outcomes)
    assert time.monotonic() - killed_at < 20
    assert capfd.readouterr() == ("", "")


def test_ray_addresses_that_cannot_be_joined_are_refused(tmp_path):
    with pytest.raises(UsageError, match="host:port"):
        RayEngine(1, address="ray://head:10001")
    with pytest.raises(
        EngineUnavailableError, match=r"cannot join the Ray cluster at 127\.0\.0\.1:1: Connection refused"
    ):
        list(run_jobs(RayEngine(1, address="127.0.0.1:1"), tmp_path, [Job(1)]))


def with_repo_on_path():
    return {**os.environ, "PYTHONPATH": str(REPO)}


ENDLESS = """
import functools, sys
from pipelines.engines.ray_engine import RayEngine
from tests.pipelines.engine_tasks import FileWorker, Job

make_worker = functools.partial(FileWorker, sys.argv[1])
list(RayEngine(1).run(make_worker, [Job(1, "until_stopped")], on_progress=print, should_stop=bool))
"""


def test_a_local_ray_is_private_and_ends_with_its_killed_driver(tmp_path):
    """It listens on the loopback interface, asks for a token, and nobody else can enter its folder."""
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    other_cluster = {"RAY_ADDRESS": "192.0.2.1:6379"}  # a local Ray must not join it
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**with_repo_on_path(), **other_cluster}) as driver:
        assert b"Report" in driver.stdout.readline()
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert len(processes) > 5
        check_private([psutil.Process(driver.pid), *processes])
        processes = [process for process in processes if "Agent" not in process.name()]  # these end after a minute
        driver.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and alive(processes):
        time.sleep(0.1)
    assert alive(processes) == []
    for folder in leftover_folders(driver.pid):  # nobody is left to remove it
        shutil.rmtree(folder)


def check_private(processes):
    connections = [connection for process in processes for connection in process.net_connections()]
    addresses = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert addresses
    assert all(address.endswith("127.0.0.1") for address in addresses)
    (environment,) = (process.environ() for process in processes if process.name() == "raylet")
    assert environment["RAY_AUTH_MODE"] == "token"
    assert Path(environment["RAY_TMPDIR"]).stat().st_mode & 0o777 == 0o700


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
