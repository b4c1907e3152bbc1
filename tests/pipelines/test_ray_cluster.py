"""The Ray engine in a cluster that is already running."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPO

pytestmark = pytest.mark.slow

RUN = """
import functools, sys
from pipelines.engines.ray_engine import run_on_ray
from tests.pipelines.engine_tasks import Job, run_jobs

run = functools.partial(run_on_ray, workers=int(sys.argv[1]), cpus=int(sys.argv[2]), address=sys.argv[3])
print(sorted(run_jobs(run, sys.argv[4], [Job(name) for name in range(6)])))
"""
OCCUPY = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
Occupant = ray.remote(num_cpus=1)(type("Occupant", (), {"wait": lambda self: None}))
occupants = [Occupant.remote() for _ in range(2)]
ray.get([occupant.wait.remote() for occupant in occupants])
print("occupied", flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def cluster():
    """Address of a cluster of one node with 3 CPUs that asks for a token, and the environment that joins it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = tempfile.mkdtemp(prefix="ray-test-", dir="/tmp")
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    start = ["start", "--head", "--block", "--num-cpus=3", "--include-dashboard=false", "--node-ip-address=127.0.0.1"]
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *start, f"--port={address.rpartition(':')[2]}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until_open(address)
    yield address, environment
    processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    head.wait()
    shutil.rmtree(folder, ignore_errors=True)


def wait_until_open(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            time.sleep(3)  # the raylet registers after the port opens
            return
    raise TimeoutError(address)


def run_engine(cluster, folder: Path, *, workers: int, cpus: int, environment=None) -> subprocess.CompletedProcess:
    address, its_environment = cluster
    return subprocess.run(
        [sys.executable, "-c", RUN, str(workers), str(cpus), address, str(folder)],
        env=environment or its_environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def workers_used(folder: Path) -> int:
    return len(list(folder.glob("worker-*")))


def test_more_workers_than_the_cluster_has_room_for(cluster, tmp_path):
    done = run_engine(cluster, tmp_path, workers=20, cpus=2)
    assert done.stdout == "[0, 10, 20, 30, 40, 50]\n", done.stderr
    assert workers_used(tmp_path) == 1


def test_a_worker_that_no_node_has_room_for_is_refused(cluster, tmp_path):
    done = run_engine(cluster, tmp_path, workers=1, cpus=4)
    assert (
        "a worker needs 4 CPUs and 0 GPUs on one node, but the nodes of the Ray cluster have room for only 0"
        in done.stderr
    )


def test_a_busy_cluster_delays_some_workers_only(cluster, tmp_path):
    address, environment = cluster
    with subprocess.Popen([sys.executable, "-c", OCCUPY, address], env=environment, stdout=subprocess.PIPE) as occupant:
        assert occupant.stdout.readline() == b"occupied\n"
        done = run_engine(cluster, tmp_path, workers=3, cpus=1)
        occupant.kill()
    assert done.stdout == "[0, 10, 20, 30, 40, 50]\n", done.stderr


def test_the_token_is_needed(cluster, tmp_path):
    address, environment = cluster
    done = run_engine(cluster, tmp_path, workers=1, cpus=1, environment={**environment, "RAY_AUTH_TOKEN": "f" * 64})
    assert f"cannot join the Ray cluster at {address}" in done.stderr
    assert workers_used(tmp_path) == 0
