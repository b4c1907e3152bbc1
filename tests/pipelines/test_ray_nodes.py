"""The Ray engine in a cluster whose nodes are killed and replaced during a run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.engines.ray_engine import ATTEMPTS
from tests.integration.ray_nodes import RayNodes, ray_nodes

pytestmark = pytest.mark.slow

RUN = """
import dataclasses, functools, json, sys
from pipelines.engines.ray_engine import RayEngine
from tests.pipelines.engine_tasks import FileWorker, Job

engine = RayEngine(None, address=sys.argv[1], node_wait_seconds=float(sys.argv[4]))
make_worker = functools.partial(FileWorker, sys.argv[2])
for item in engine.run(make_worker, [Job(7, sys.argv[3])], on_progress=lambda _: None, should_stop=lambda: False):
    print(json.dumps([type(item).__name__, dataclasses.asdict(item)]), flush=True)
"""
UNFORGIVING = """
import pipelines.engines.ray_engine as ray_engine

ray_engine.FORGIVEN_LOSSES, ray_engine.ATTEMPTS = 1, 2
"""
RUN_SECONDS = 300


@pytest.fixture(scope="module")
def cluster():
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster):
    yield cluster
    cluster.remove_all()


def start(
    nodes: RayNodes, folder: Path, action: str, *, node_wait_seconds: float = 600, before: str = ""
) -> subprocess.Popen:
    """Start a run of one task. The cluster must have a node already, because a run without room is refused."""
    return subprocess.Popen(
        [sys.executable, "-c", before + RUN, nodes.address, str(folder), action, str(node_wait_seconds)],
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_attempts(run: subprocess.Popen, folder: Path, attempts: int) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while not (folder / "7").exists() or (folder / "7").read_text().count("attempt") < attempts:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def end(run: subprocess.Popen) -> tuple[list[list], str]:
    out, err = run.communicate(timeout=RUN_SECONDS)
    return [json.loads(line) for line in out.splitlines()], err


def test_as_many_lost_nodes_as_workers_may_die_do_not_count_against_a_task(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, "wait_for_go") as run:
        for lost in range(ATTEMPTS):
            nodes.add(3 + lost)
            wait_for_attempts(run, tmp_path, lost + 1)
            nodes.kill(next(number for number in nodes.numbers if nodes.workers(number)))
        wait_for_attempts(run, tmp_path, ATTEMPTS + 1)
        (tmp_path / "go").touch()
        items, err = end(run)
    assert items[-1][0] == "TaskDone", err
    assert items[-1][1]["result"] == 70
    repeated = [item["message"] for kind, item in items if kind == "Notice" and item["repeated"]]
    assert len(repeated) == ATTEMPTS
    assert all(message.startswith("node 127.0.0.") and message.endswith(" was lost") for message in repeated)


def test_a_task_under_which_every_node_is_lost_fails(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, "wait_for_go", before=UNFORGIVING) as run:
        for lost in range(3):
            wait_for_attempts(run, tmp_path, lost + 1)
            if lost < 2:
                nodes.add(3 + lost)
            nodes.kill(2 + lost)
        items, err = end(run)
    assert [kind for kind, _ in items if kind.startswith("Task")] == ["TaskFailure"], err
    losses = [item for _, item in items if "was lost" in item["message"]]
    assert [item["repeated"] is not None for item in losses] == [True, False, False]


def test_a_task_that_kills_its_workers_fails_and_blames_no_node(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, "die") as run:
        items, err = end(run)
    assert [kind for kind, _ in items if kind != "Notice"] == ["TaskFailure"], (items, err)
    assert not any(item["repeated"] for kind, item in items if kind == "Notice"), items
    assert (tmp_path / "7").read_text().count("attempt") == ATTEMPTS


def test_a_run_waits_for_a_node_only_so_long(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, "wait_for_go", node_wait_seconds=3) as run:
        wait_for_attempts(run, tmp_path, 1)
        nodes.kill(2)
        items, err = end(run)
    assert run.returncode == 1
    assert "EdjeError: for 3s, the Ray cluster has had room for only 0 of 1 worker; add nodes" in err
    warnings = [item["message"] for _, item in items if item["is_warning"]]
    assert "waiting at most 3s for nodes with room for 1 worker" in warnings
    assert "node 127.0.0.2 left the cluster, which now has room for 0 workers" in warnings


def test_a_run_goes_on_once_a_node_joins(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, "wait_for_go") as run:
        wait_for_attempts(run, tmp_path, 1)
        nodes.stop(2)
        nodes.add(3)
        (tmp_path / "go").touch()
        items, err = end(run)
    assert items[-1][0] == "TaskDone", err
    warnings = {item["message"]: item["is_warning"] for kind, item in items if kind == "Notice"}
    assert warnings["node 127.0.0.2 was lost"]
    joined = [message for message in warnings if message.startswith("node 127.0.0.3 joined the cluster, which now has")]
    assert [warnings[message] for message in joined] == [False]
