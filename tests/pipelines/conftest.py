"""Fixtures for the tests of the pipelines: generated photos and a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.planning.config import BuildConfig


def write_photo(path: Path, seed: int) -> None:
    """A small JPEG; equal seeds give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten photos and a text file; 03 repeats 01, and 07 is not an image."""
    folder = tmp_path / "photos"
    for name in range(10):
        write_photo(folder / f"{name:02d}.jpg", 1 if name == 3 else name)
    (folder / "07.jpg").write_bytes(b"not a photo")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def config(tmp_path: Path, photos: Path, tiny_bundle: Path) -> Callable[..., BuildConfig]:
    """Makes a request to build `photos` in shards of four rows, with changes."""

    def make(**changes: object) -> BuildConfig:
        settings = {"shard_size": 4, "batch_size": 2, "threads": 1, "device": "cpu", "engine": "inline"}
        return BuildConfig((str(photos),), tmp_path / "index", tiny_bundle, **{**settings, **changes})

    return make
