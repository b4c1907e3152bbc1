"""Fixtures for the tests of the pipelines: generated photos and a tiny model."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from pipelines.jobs.build import build_index
from pipelines.progress.events import (
    JobStopped,
    Progress,
    ignore,
    never,
)
from storage_formats.format.layout import IndexSpec
from tests.conftest import write_random_index

INLINE = [
    "--engine",
    "inline",
    "--shard-size",
    "4",
    "--batch-size",
    "2",
    "--threads",
    "1",
    "--device",
    "cpu",
]
"""Options of a build in this process, in shards of four."""

SMALL = IndexSpec(21, 8, (2, 8), 4, precisions=("bf16", "fp8"))


def run_build(request, on_event=ignore, should_stop=never):
    """Build the index that `request` describes."""
    return build_index(**vars(request), on_event=on_event, should_stop=should_stop)


def stop_after_one_shard(job, *arguments, **options):
    """Call `job`, and stop it once a shard is finished."""
    finished = []

    def note(event):
        if isinstance(event, Progress) and event.finished_shards:
            finished.append(event)

    with pytest.raises(JobStopped):
        job(*arguments, **options, on_event=note, should_stop=lambda: bool(finished))


def write_photo(path, seed):
    """A small JPEG; equal seeds give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")


@pytest.fixture
def index(tmp_path):
    write_random_index(tmp_path / "photos.edje", SMALL, failed=frozenset({5}), seed=1)
    return tmp_path / "photos.edje"


@pytest.fixture
def other(tmp_path):
    write_random_index(tmp_path / "other.edje", SMALL, seed=2)
    return tmp_path / "other.edje"


@pytest.fixture
def photos(tmp_path):
    """Ten photos and a text file; 03 repeats 01, and 07 is not an image."""
    folder = tmp_path / "photos"
    for name in range(10):
        write_photo(folder / f"{name:02d}.jpg", 1 if name == 3 else name)
    (folder / "07.jpg").write_bytes(b"not a photo")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def config(tmp_path, photos, tiny_bundle):
    """Makes a request to build `photos` in shards of four rows, with changes."""

    def make(**changes):
        settings = {
            "sources": (str(photos),),
            "out": tmp_path / "index",
            "model": tiny_bundle,
            "shard_size": 4,
            "batch_size": 2,
            "threads": 1,
            "device": "cpu",
            "engine": "inline",
        }
        return SimpleNamespace(**{**settings, **changes})

    return make
