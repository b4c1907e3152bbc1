"""Training on a Ray cluster of two raylets. The test kills one of them in mid-run."""

from __future__ import annotations

import subprocess

import pytest

from edje_index.training.checkpoints import read_log
from tests.command_line import command, run_process
from tests.integration.test_training import make_case, training, wait_for_steps

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The folder of `make_case`, and a training run on two workers of this machine."""
    folder = tmp_path_factory.mktemp("training")
    make_case(folder)
    run_process(*arguments(folder, folder / "local"))
    return folder


@pytest.fixture
def nodes(cluster):
    cluster.add(2)
    cluster.add(3)
    yield cluster
    cluster.remove_all()


def arguments(folder, out):
    settings = ("alignment.steps=0", f"loop.steps={STEPS}", "run.workers=2")
    return training(folder, out, *settings)


def start(case, out, nodes):
    arguments_on_nodes = [
        *arguments(case, out),
        "--set",
        f"run.address={nodes.address}",
        "--json",
    ]
    return subprocess.Popen(
        command(*arguments_on_nodes),
        env=nodes.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_losses(case, out):
    local, several = (
        read_log(folder.with_suffix(".run")) for folder in (case / "local", out)
    )
    assert [record["step"] for record in several] == list(range(1, STEPS + 1))
    for one, other in zip(local, several, strict=True):
        assert other["itm"] == pytest.approx(one["itm"], abs=1e-4)


def test_a_run_on_two_nodes_goes_on_after_a_node_is_replaced(case, nodes, tmp_path):
    process = start(case, tmp_path / "out", nodes)
    wait_for_steps(process, tmp_path / "out.run", 10)
    nodes.kill(3)
    nodes.add(4)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "node 127.0.0.3 left the cluster" in error
    assert "node 127.0.0.4 joined the cluster" in error
    check_losses(case, tmp_path / "out")


def test_auto_takes_the_gpus_of_a_cluster_whose_driver_has_none(
    case, cluster, tmp_path
):
    """The nodes only say that they have GPUs, so the workers cannot use them."""
    cluster.add(5, gpus=1)
    cluster.add(6, gpus=1)
    process = start(case, tmp_path / "out", cluster)
    _, error = process.communicate(timeout=300)
    cluster.remove_all()
    assert process.returncode == 1
    assert "NCCL" in error
