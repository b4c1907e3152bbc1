"""Builds on a Ray cluster of several raylets whose nodes join, leave and die in
mid-run.
"""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import verify_index
from tests.command_line import command, run_here
from tests.integration.builds import contents, make_photos

pytestmark = pytest.mark.slow

PHOTOS = 160
BUILD_SECONDS = 300


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folder with photos, a tiny model, and an index that one process built."""
    folder = tmp_path_factory.mktemp("machines")
    make_photos(folder / "photos", PHOTOS)
    create_untrained_bundle(folder / "model", sizes=TINY)
    run_here(*build(folder, folder / "calm"), "--engine", "inline")
    return folder


def build(folder, out):
    sizes = ["--shard-size", "4", "--batch-size", "4", "--threads", "1", "--dedupe"]
    # an eighth of the photos is broken
    options = ["--model", folder / "model", *sizes, "--max-failed", "0.2"]
    return ["build", folder / "photos", "--out", out, *options]


class Build:
    """A build on the cluster, in a process of its own, which ends with the `with`
    block.
    """

    def __init__(self, case, out, nodes):
        self.out = out
        self.process = subprocess.Popen(
            command(*build(case, out), "--address", nodes.address, "--json"),
            env=nodes.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def wait_for_receipt(self):
        deadline = time.monotonic() + BUILD_SECONDS
        while not any((self.out / "build/receipts").glob("*")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def result(self):
        out, err = self.process.communicate(timeout=BUILD_SECONDS)
        assert self.process.returncode == 0, err
        assert "Traceback" not in err
        return json.loads(out)

    def error(self):
        _, err = self.process.communicate(timeout=BUILD_SECONDS)
        assert self.process.returncode == 1
        assert "Traceback" not in err
        return err


def check(result, case, out):
    assert (
        result["inputs"]
        == result["indexed"] + result["duplicates"] + result["failed"]
        == PHOTOS
    )
    assert verify_index(out) == []
    assert contents(out) == contents(case / "calm")


# Ray notices late that a node was killed, so no such test comes before this one.
def test_a_node_without_the_index_directory_is_named(case, nodes, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    nodes.add(2, hidden=shared)
    with Build(case, shared / "index", nodes) as run:
        assert f"does not see the index directory {shared}/index" in run.error()


@pytest.mark.parametrize("lacking", ["model", "photos"])
def test_a_node_without_the_model_or_the_photos_is_named(
    case, nodes, tmp_path, lacking
):
    nodes.add(2, hidden=case / lacking)
    with Build(case, tmp_path / "index", nodes) as run:
        assert "on node 127.0.0.2" in run.error()
    # On a machine that has everything, the same command finishes the build.
    nodes.kill(2)
    nodes.add(3)
    with Build(case, tmp_path / "index", nodes) as run:
        check(run.result(), case, run.out)


def test_nodes_of_several_sizes_one_of_which_dies(case, nodes, tmp_path):
    nodes.add(2)
    nodes.add(3, cpus=2)
    with Build(case, tmp_path / "index", nodes) as run:
        run.wait_for_receipt()
        nodes.kill(2)
        # The build may end before Ray notices the loss;
        # tests/pipelines/test_ray_nodes.py waits for this message.
        check(run.result(), case, run.out)
