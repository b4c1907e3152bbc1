"""What the Ray engine adds to the contract of the engines. Each test starts a Ray
of its own and sees it end.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipelines.engines import ray_engine
from pipelines.engines.base import (
    EngineUnavailableError,
    TaskFailedError,
)
from pipelines.engines.ray_engine import ATTEMPTS, RayCluster, run_on_ray
from storage_formats.errors import EdjeError, UsageError
from tests.conftest import environment
from tests.pipelines.conftest import run_build
from tests.pipelines.engine_tasks import Job, run_jobs

SET_FOR_RAY = ["PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_TMPDIR"]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    # such as the resource tracker of multiprocessing
    processes = set(psutil.Process().children(recursive=True))
    variables = {name: os.environ.get(name) for name in SET_FOR_RAY}
    yield
    # a killed process takes some time to end
    started = set(psutil.Process().children(recursive=True)) - processes
    assert psutil.wait_procs(started, timeout=5)[1] == []
    assert leftover_folders(os.getpid()) == []
    assert {name: os.environ.get(name) for name in SET_FOR_RAY} == variables


@pytest.mark.parametrize(
    ("gpus", "need", "workers"), [(1, 0.2, 5), (2, 0.2, 10), (1, 0.3, 3), (0, 0.5, 0)]
)
def test_fractions_of_a_gpu_are_counted_as_ray_counts_them(gpus, need, workers):
    node = {"NodeID": "1", "Alive": True, "Resources": {"CPU": 16, "GPU": gpus}}
    ray = SimpleNamespace(nodes=lambda: [node])
    assert RayCluster(ray, 1, need, 0).room == workers


@pytest.mark.slow
def test_a_task_that_always_hangs_fails_and_a_slow_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "STALL_SECONDS", 4)
    run = run_jobs(
        functools.partial(run_on_ray, workers=2),
        tmp_path,
        [Job(1, "stop"), Job(2, "report_for_long")],
    )
    assert next(run) == 20
    with pytest.raises(TaskFailedError, match="made no progress for 0:00:04"):
        next(run)
    assert [(tmp_path / name).read_text().count("attempt") for name in "12"] == [
        ATTEMPTS,
        1,
    ]


@pytest.mark.parametrize(
    "victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)]
)
def test_a_local_ray_is_private_and_its_death_is_one_clear_error_in_bounded_time(
    tmp_path, capfd, monkeypatch, victim
):
    """It listens on the loopback interface, asks for a token, and nobody else can
    enter its folder.
    """
    # a local Ray must not join it
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    killed_at = None

    def kill(_report):
        nonlocal killed_at
        if killed_at is None:
            processes = psutil.Process().children(recursive=True)
            check_private([psutil.Process(), *processes])
            killed_at = time.monotonic()
            next(each for each in processes if each.name() == victim).kill()

    results = run_jobs(
        run_on_ray, tmp_path, [Job(1, "until_stopped")], on_progress=kill
    )
    with pytest.raises(
        EdjeError, match=f"^Ray ended during the run: its {victim} process is gone"
    ):
        list(results)
    assert time.monotonic() - killed_at < 20
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("ray://head:10001", UsageError, "host:port"),
        (
            "127.0.0.1:1",
            EngineUnavailableError,
            r"cannot join the Ray cluster at 127\.0\.0\.1:1: Connection refused",
        ),
    ],
)
def test_ray_addresses_that_cannot_be_joined_are_refused(
    tmp_path, address, error, words
):
    with pytest.raises(error, match=words):
        list(
            run_jobs(functools.partial(run_on_ray, address=address), tmp_path, [Job(1)])
        )


def test_a_cluster_that_cannot_be_joined_is_refused_before_a_silent_pipe_is_read(
    config, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(EngineUnavailableError, match="Connection refused"):
        run_build(config(sources=("-",), engine="ray", address="127.0.0.1:1"))


ENDLESS = """
import sys
from pipelines.engines.ray_engine import run_on_ray
from tests.pipelines.engine_tasks import Job, run_jobs

list(run_jobs(run_on_ray, sys.argv[1], [Job(1, "until_stopped")], on_progress=print))
"""


@pytest.mark.slow
def test_a_local_ray_ends_with_its_killed_driver(tmp_path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as driver:
        assert b"Report" in driver.stdout.readline()
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert len(processes) > 5
        # these end after a minute
        processes = [process for process in processes if "Agent" not in process.name()]
        driver.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and alive(processes):
        time.sleep(0.1)
    assert alive(processes) == []
    (folder,) = leftover_folders(driver.pid)
    shutil.rmtree(folder)


def check_private(processes):
    connections = [
        connection for process in processes for connection in process.net_connections()
    ]
    addresses = {
        connection.laddr.ip
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert all(address.endswith("127.0.0.1") for address in addresses)
    (settings,) = (
        process.environ() for process in processes if process.name() == "raylet"
    )
    assert settings["RAY_AUTH_MODE"] == "token"
    assert Path(settings["RAY_TMPDIR"]).stat().st_mode & 0o777 == 0o700


def alive(processes):
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def leftover_folders(driver_pid):
    return list(Path("/tmp").glob(f"edje-ray-{driver_pid}-*"))


IMPORTED_EARLY = """
import ray
from pipelines.engines.ray_engine import run_on_ray

list(run_on_ray(list, [], on_progress=print, on_event=print, should_stop=bool))
"""


def test_a_ray_that_was_imported_with_open_settings_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_EARLY],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert (
        "set RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before you"
        " import ray" in done.stderr
    )


@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_hook_is_used_where_a_folder_hides_the_packages(
    tmp_path, monkeypatch, is_hidden
):
    ray = pytest.importorskip("ray")
    options = {}
    monkeypatch.setattr(ray, "init", options.update)
    if is_hidden:
        (tmp_path / "pipelines").mkdir()
        (tmp_path / "pipelines" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        ray_engine._initialize(stack)
    hook = {"worker_process_setup_hook": "storage_formats.launch.share_package"}
    assert options["runtime_env"] == (hook if is_hidden else None)
