"""Builds on a Ray cluster of several raylets whose nodes join, leave and die in
mid-run.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import verify_index
from tests.command_line import command, run_here
from tests.integration.builds import contents, make_photos
from tests.integration.ray_nodes import RayNodes

pytestmark = pytest.mark.slow

PHOTOS = 160
SHARD_SIZE = 4
BUILD_SECONDS = 300


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folder with photos, a tiny model, and an index that one process built."""
    folder = tmp_path_factory.mktemp("machines")
    make_photos(folder / "photos", PHOTOS)
    create_untrained_bundle(folder / "model", sizes=TINY)
    run_here(*build(folder, folder / "calm"), "--engine", "inline")
    return folder


def build(folder: Path, out: Path) -> list[str | Path]:
    sizes = [
        "--shard-size",
        str(SHARD_SIZE),
        "--batch-size",
        "4",
        "--threads",
        "1",
        "--dedupe",
        # an eighth of the photos is broken
        "--max-failed",
        "0.2",
    ]
    return [
        "build",
        folder / "photos",
        "--out",
        out,
        "--model",
        folder / "model",
        *sizes,
    ]


class Build:
    """A build on the cluster, in a process of its own, which ends with the `with`
    block.
    """

    def __init__(self, case: Path, out: Path, nodes: RayNodes) -> None:
        self.out = out
        self.log = out.with_suffix(".jsonl")
        self.nodes = nodes
        self.process = subprocess.Popen(
            command(
                "--log",
                self.log,
                *build(case, out),
                "--address",
                nodes.address,
                "--json",
            ),
            env=nodes.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def messages(self) -> list[str]:
        return [event["text"] for event in self.events("message")]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BUILD_SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.messages()
            time.sleep(0.02)

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=BUILD_SECONDS)
        assert self.process.returncode == 0, err
        assert "Traceback" not in err
        return json.loads(out)


def check(result: dict[str, Any], case: Path, out: Path) -> None:
    assert (
        result["inputs"]
        == result["indexed"] + result["duplicates"] + result["failed"]
        == PHOTOS
    )
    assert verify_index(out) == []
    assert contents(out) == contents(case / "calm")


# Ray notices late that a node was killed, so no such test comes before this one.
def test_a_node_without_the_index_directory_is_named(case, nodes, tmp_path):
    (tmp_path / "shared").mkdir()
    nodes.add(2, hidden=tmp_path / "shared")
    with Build(case, tmp_path / "shared" / "index", nodes) as run:
        _, err = run.process.communicate(timeout=BUILD_SECONDS)
        assert run.process.returncode == 1
        assert (
            f"does not see the index directory {tmp_path}/shared/index of this job; put"
            " the index into" in err
        )
        assert "Traceback" not in err

        # The build may end before Ray notices the loss;
        # tests/pipelines/test_ray_nodes.py waits for this message.


@pytest.mark.parametrize("lacking", ["model", "photos"])
def test_a_node_without_the_model_or_the_photos_is_named(
    case, nodes, tmp_path, lacking
):
    nodes.add(2, hidden=case / lacking)
    with Build(case, tmp_path / "index", nodes) as run:
        _, err = run.process.communicate(timeout=BUILD_SECONDS)
        assert run.process.returncode == 1
        assert "on node 127.0.0.2" in err
        assert "Traceback" not in err
    # On a machine that has everything, the same command finishes the build.
    nodes.kill(2)
    nodes.add(3)
    with Build(case, tmp_path / "index", nodes) as run:
        check(run.result(), case, run.out)


def test_nodes_of_several_sizes_one_of_which_dies(case, nodes, tmp_path):
    nodes.add(2)
    nodes.add(3, cpus=2)
    with Build(case, tmp_path / "index", nodes) as run:
        run.wait_until(lambda: any((run.out / "build" / "receipts").glob("*")))
        nodes.kill(2)
        check(run.result(), case, run.out)
