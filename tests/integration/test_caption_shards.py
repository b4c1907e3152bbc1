"""Captions prepared on Ray, and after a kill: the bytes are those of one worker in this process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from tests.command_line import command, environment, run_here, run_process
from tests.integration.test_training import OPTIONS, write_captions

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Folder with 24 photos of 2,000 captions each, which are three shards, and a training without a break."""
    folder = tmp_path_factory.mktemp("many")
    write_captions(folder)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["captions"] = [f"{line['captions'][0]} seen {count * 24 + number} times" for count in range(2000)] + [" "]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    create_untrained_bundle(folder / "model", sizes=TINY)
    result = run_here(*training(folder, "calm"))
    assert (result["captions"], result["left_out"]) == (48_000, {"blank-caption": 24})
    return folder


def training(folder: Path, name: str, workers: int = 1) -> list[str | Path]:
    inputs = ["train", folder / "train.jsonl", "--images", folder / "photos", "--model", folder / "model"]
    return [*inputs, *OPTIONS, "--steps", "2", "--out", folder / name, "--workers", str(workers)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_driver_resumes_to_the_same_bytes(many, workers):
    name = f"killed-{workers}"
    process = subprocess.Popen(
        command(*training(many, name, workers), "--json"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment(), text=True,
    )  # fmt: skip
    shard = many / f"{name}.run" / ".data.part" / "00000000.npz"
    deadline = time.monotonic() + 400
    while not shard.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (many / f"{name}.run" / "data").exists()
    run_process(*training(many, name, workers))
    assert contents(many / f"{name}.run" / "data") == contents(many / "calm.run" / "data")
