"""The Ray engine in a cluster that is already running, whose nodes are killed and
replaced during a run.
"""

import json
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

RUN = """
import dataclasses, functools, json, sys
from pipelines.engines import ray_engine
from pipelines.engines.ray_engine import run_on_ray
from tests.pipelines.engine_tasks import Job, run_jobs

if len(sys.argv) > 5:
    ray_engine.NODE_WAIT_SECONDS = int(sys.argv[5])
run = functools.partial(run_on_ray, address=sys.argv[1], **json.loads(sys.argv[4]))
jobs = [Job(*job) for job in json.loads(sys.argv[3])]
show = lambda event: print(json.dumps(dataclasses.asdict(event)), flush=True)
for result in run_jobs(run, sys.argv[2], jobs, on_event=show):
    print(result)
"""
RUN_SECONDS = 300
SIX = [[name] for name in range(1, 7)]
RESULTS = [10, 20, 30, 40, 50, 60]


def start(nodes, folder, jobs, *, token=None, wait_seconds=None, **options):
    """Start a run. The cluster must have a node already, because a run without room
    is refused.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            RUN,
            nodes.address,
            str(folder),
            json.dumps(jobs),
            json.dumps(options),
            *([] if wait_seconds is None else [str(wait_seconds)]),
        ],
        env={**nodes.environment, **({"RAY_AUTH_TOKEN": token} if token else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_attempts(run, folder, attempts):
    deadline = time.monotonic() + RUN_SECONDS
    while (
        not (folder / "7").exists()
        or (folder / "7").read_text().count("attempt") < attempts
    ):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def end(run):
    """The messages and the results of a run, and its standard error."""
    out, err = run.communicate(timeout=RUN_SECONDS)
    return [json.loads(line) for line in out.splitlines()], err


def test_the_task_of_a_lost_node_runs_again_on_a_node_that_joins(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, [[7, "wait_for_go"]]) as run:
        for lost, end_node in ((2, nodes.kill), (3, nodes.stop)):
            wait_for_attempts(run, tmp_path, lost - 1)
            nodes.add(lost + 1)
            end_node(lost)
        wait_for_attempts(run, tmp_path, 3)
        (tmp_path / "go").touch()
        items, err = end(run)
    assert items[-1] == 70, err
    notices = [
        (item["text"].partition(",")[0], item["is_warning"]) for item in items[:-1]
    ]
    # Ray may notice later that a node is gone
    for number in (2, 3):
        died = f"a worker died on node 127.0.0.{number}; its task runs again"
        texts = [text.partition(" (")[0] for text, is_warning in notices if is_warning]
        assert {died, f"node 127.0.0.{number} left the cluster"} & {*texts}
    for number in (3, 4):
        assert (f"node 127.0.0.{number} joined the cluster", False) in notices


DEVICE = """
import sys
from pipelines.engines.ray_engine import best_device, run_on_ray

print(best_device(sys.argv[1]))

def make_worker():
    from pipelines.engines.base import machine_gpus
    return lambda *_: machine_gpus()

answers = run_on_ray(
    make_worker, [0], on_progress=print, on_event=print, should_stop=lambda: False,
    address=sys.argv[1], workers=1, gpus=0.5
)
print(next(answers))
"""


def test_the_cluster_has_the_device_and_not_the_driver(nodes):
    def ask():
        command = [sys.executable, "-c", DEVICE, nodes.address]
        return subprocess.run(
            command, env=nodes.environment, capture_output=True, text=True, check=False
        )

    nodes.add(2)
    done = ask()
    assert done.stdout == "cpu\n", done.stderr
    assert "needs 1 CPUs and 0.5 GPUs on one node" in done.stderr
    nodes.add(3, gpus=2)
    done = ask()
    assert done.stdout.splitlines() == ["cuda", "2"], done.stderr


def test_a_run_waits_for_a_node_only_so_long(nodes, tmp_path):
    nodes.add(2)
    with start(nodes, tmp_path, [[7, "wait_for_go"]], wait_seconds=3) as run:
        wait_for_attempts(run, tmp_path, 1)
        nodes.kill(2)
        items, err = end(run)
    assert run.returncode == 1
    assert (
        "EdjeError: for 0:00:03, the Ray cluster has had room for only 0 of 1 worker;"
        " add nodes" in err
    )
    # Ray may notice only now that a node of another test is gone.
    text = "node 127.0.0.2 left the cluster, which now has room for 0 workers"
    assert text in [each.get("text") for each in items]


def test_a_run_says_that_it_waits_for_a_busy_cluster(nodes, tmp_path):
    nodes.add(2, cpus=1)
    other = tmp_path / "other"
    other.mkdir()
    with start(nodes, other, [[7, "wait_for_go"]]) as busy:
        wait_for_attempts(busy, other, 1)
        with start(nodes, tmp_path, [[1]]) as run:
            text = json.loads(run.stdout.readline())["text"]
            (other / "go").touch()
            items, err = end(run)
        end(busy)
    assert text == "waiting for free CPUs and GPUs in the Ray cluster"
    assert items == [10], err


def test_more_workers_than_the_cluster_has_room_for(nodes, tmp_path):
    nodes.add(2, cpus=3)
    items, err = end(start(nodes, tmp_path, SIX, workers=20, cpus=2))
    assert sorted(items) == RESULTS, err
    assert len(list(tmp_path.glob("worker-*"))) == 1
    _, err = end(start(nodes, tmp_path, SIX, workers=1, cpus=4))
    assert (
        "a worker needs 4 CPUs and 0 GPUs on one node, but the nodes of the Ray cluster"
        " have room" in err
    )
    _, err = end(start(nodes, tmp_path, SIX, workers=1, token="f" * 64))
    assert f"cannot join the Ray cluster at {nodes.address}" in err


def test_a_failed_task_ends_the_run_and_names_its_node(nodes, tmp_path):
    nodes.add(2)
    nodes.add(3)
    _, err = end(start(nodes, tmp_path, [[7, "fill_disk"]]))
    assert "No space left on device: /photos.edje/tokens on node 127.0.0." in err
    assert (tmp_path / "7").read_text().count("attempt") == 1


def test_auto_finds_the_cluster_of_this_machine(nodes, tmp_path):
    nodes.add(2)
    nodes.environment["RAY_ADDRESS"] = nodes.address
    address = nodes.address
    nodes.address = "auto"
    try:
        items, err = end(start(nodes, tmp_path, SIX))
    finally:
        nodes.address = address
        del nodes.environment["RAY_ADDRESS"]
    assert sorted(items) == RESULTS, err
