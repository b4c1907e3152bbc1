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
from edje_index.training import captions as caption_shards
from edje_index.training.captions import CaptionSet
from pipelines.engines.base import open_engine
from pipelines.jobs.training import captions as caption_job
from pipelines.progress.events import Progress
from storage_formats.format.layout import IndexSpec
from tests.command_line import command, environment, run_here
from tests.conftest import write_random_index
from tests.edje_index.training.conftest import captions, prepare
from tests.integration.test_training import OPTIONS, write_captions

pytestmark = pytest.mark.slow

IMAGES = 600


@pytest.fixture
def run(tmp_path, tiny_bundle, monkeypatch):
    """A function that prepares captions in shards of 100, and returns the folder of the data."""
    monkeypatch.setattr(caption_shards, "SHARD_CAPTIONS", 100)
    write_random_index(tmp_path / "index", IndexSpec(IMAGES, 256, (4, 16), embed_dim=24))
    items = CaptionSet(np.arange(IMAGES), captions(IMAGES))

    def prepared(name: str, engine: str, on_event=lambda _: None, workers: int = 1) -> Path:
        monkeypatch.setattr(
            caption_job, "open_engine", lambda _, *args, **options: open_engine(engine, *args, **options)
        )
        options = {"miner": tiny_bundle, "on_event": on_event, "workers": workers}
        prepare(tmp_path / name, items, tiny_bundle, tmp_path / "index", **options)
        return tmp_path / name

    return prepared


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, 2])
def test_engines_and_workers_give_the_same_bytes(run, workers):
    events = []
    assert contents(run("ray", "ray", events.append, workers)) == contents(run("inline", "inline"))
    last = [event for event in events if isinstance(event, Progress) and event.shards][-1]
    assert (last.done, last.total, last.finished_shards, last.shards) == (1200, 1200, 12, 12)


def test_a_killed_worker_is_replaced(run):
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

    assert contents(run("killed", "ray", kill_once, workers=2)) == contents(run("calm", "inline"))
    assert killed


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
