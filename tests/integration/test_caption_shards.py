"""Captions prepared on Ray, and after kills: the bytes are those of one worker in this process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.training.data import caption_table
from edje_index.training.data.dataset import CaptionSet
from pipelines.jobs.training import caption_shards
from pipelines.jobs.training.caption_shards import CaptionJob
from pipelines.jobs.training.matching import MiningModel
from pipelines.progress.events import Progress
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from tests.command_line import command, environment, run_here
from tests.conftest import write_random_index
from tests.edje_index.training.conftest import captions, prepare
from tests.integration.test_training import OPTIONS, write_captions

pytestmark = pytest.mark.slow

IMAGES = 600


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", 100)


@pytest.fixture
def job(tmp_path, tiny_bundle):
    write_random_index(tmp_path / "index", IndexSpec(IMAGES, 256, (4, 16), embed_dim=24))
    items = CaptionSet(np.arange(IMAGES), captions(IMAGES))
    mining = MiningModel(tiny_bundle, CommittedIndex.open(tmp_path / "index"), items.rows)
    return lambda name: CaptionJob(tmp_path / name, items, tiny_bundle, mining)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, 2])
def test_engines_and_workers_give_the_same_bytes(job, small_shards, monkeypatch, workers):
    prepare(job("inline"))
    monkeypatch.setattr(caption_shards, "_uses_ray", lambda run, device: True)
    events = []
    prepare(job("ray"), events.append, workers=workers)
    assert contents(job("ray").folder) == contents(job("inline").folder)
    last = [event for event in events if isinstance(event, Progress) and event.shards][-1]
    assert (last.done, last.total, last.finished_shards, last.shards) == (1200, 1200, 12, 12)


def test_a_killed_worker_is_replaced(job, small_shards, monkeypatch):
    prepare(job("calm"))
    monkeypatch.setattr(caption_shards, "_uses_ray", lambda run, device: True)
    killed: list[int] = []

    def kill_once(event):
        if isinstance(event, Progress) and not killed:
            workers = [
                child
                for child in psutil.Process().children(recursive=True)
                if "ray::_WorkerActor" in " ".join(child.cmdline()[:1])
            ]
            killed.append(workers[0].pid)
            workers[0].kill()

    prepare(job("killed"), kill_once, workers=2)
    assert killed
    assert contents(job("killed").folder) == contents(job("calm").folder)


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
    receipt = many / f"{name}.run" / ".data.part" / "build" / "receipts" / "00000000.json"
    deadline = time.monotonic() + 400
    while not receipt.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (many / f"{name}.run" / "data").exists()
    run_here(*training(many, name))
    assert contents(many / f"{name}.run" / "data") == contents(many / "calm.run" / "data")
