"""Random crops of photos: each is most of the photo, upright, and has its captions."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edje_index.captions.reading import CaptionedImage
from models.crops import random_crop, write_crops


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards, from 0 to 255."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(
        np.stack([across, down, np.zeros_like(down)], axis=2).astype(np.uint8)
    )


@given(
    width=st.integers(16, 300),
    height=st.integers(16, 300),
    seed=st.integers(0, 1 << 30),
)
def test_a_crop_is_most_of_the_photo_upright(width, height, seed):
    rng = np.random.default_rng(seed)
    crop = np.asarray(random_crop(gradient(width, height), 32, rng)).astype(float)
    assert crop.shape == (32, 32, 3)
    across = crop[:, :, 0].mean(axis=0)
    down = crop[:, :, 1].mean(axis=1)
    mirrored = across[0] > across[-1]
    assert (np.diff(across[::-1] if mirrored else across) >= -1).all()
    assert (np.diff(down) >= -1).all()
    seen = (across.max() - across.min()) / 255 * (down.max() - down.min()) / 255
    longest = max(width / height, height / width)
    # crops of elongated photos are smaller, because the aspect ratio is limited
    assert seen > 0.35 / (longest * 4 / 3) - 0.25


def test_crops_have_the_captions_of_their_photo_and_do_not_depend_on_its_path(tmp_path):
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        gradient(40, 30).save(path)
    items = [CaptionedImage(str(path), ("a dog",), None) for path in paths]
    write_crops(items, tmp_path / "out", 2, 24)
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / "list.jsonl").read_text().splitlines()
    ]
    names = [str(paths[0]), "0-0.jpg", "0-1.jpg", str(paths[1]), "1-0.jpg", "1-1.jpg"]
    assert [line["path"] for line in lines] == names
    assert [line["image_id"] for line in lines] == ["0"] * 3 + ["1"] * 3
    assert all(line["captions"] == ["a dog"] for line in lines)
    crops = [(tmp_path / "out" / name).read_bytes() for name in names if "jpg" in name]
    assert crops[:2] == crops[2:]
    assert crops[0] != crops[1]
