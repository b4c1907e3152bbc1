from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edje_index.images.decode import decode_rgb
from edje_index.images.decoded_input import DecodeSettings
from edje_index.images.inputs import InputRef
from edje_index.training.data.crops import Crops, random_view
from pipelines.jobs.training.view_images import view_path, write_views
from pipelines.progress.events import JobStopped


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards, from 0 to 255."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, np.zeros_like(down)], axis=2).astype(np.uint8))


@given(width=st.integers(16, 300), height=st.integers(16, 300), seed=st.integers(0, 1 << 30))
def test_a_view_is_most_of_the_photo_upright(width, height, seed):
    view = np.asarray(random_view(gradient(width, height), (32, 48), np.random.default_rng(seed))).astype(float)
    assert view.shape == (32, 48, 3)
    across, down = view[:, :, 0].mean(axis=0), view[:, :, 1].mean(axis=1)
    mirrored = across[0] > across[-1]
    assert (np.diff(across[::-1] if mirrored else across) >= -1).all()
    assert (np.diff(down) >= -1).all()
    seen = (across.max() - across.min()) / 255 * (down.max() - down.min()) / 255
    longest = max(width / height, height / width)
    assert seen > 0.35 / (longest * 4 / 3) - 0.25  # a long photo has no crop of its own area in the allowed aspects


def test_half_of_the_views_are_mirrored():
    photo = gradient(64, 64)
    views = [np.asarray(random_view(photo, (8, 8), np.random.default_rng(seed))) for seed in range(400)]
    mirrored = sum(bool(view[0, 0, 0] > view[0, -1, 0]) for view in views)
    assert 150 < mirrored < 250
    assert len({view.tobytes() for view in views}) > 390


@pytest.fixture
def refs(tmp_path):
    """Two photos and a file that is none."""
    for at in range(2):
        gradient(40 + at, 30).save(tmp_path / f"{at}.png")
    (tmp_path / "2.png").write_bytes(b"no image")
    return [InputRef(str(path), str(path).encode()) for path in (tmp_path / f"{at}.png" for at in range(3))]


def test_every_photo_has_its_views_in_the_list(refs, tmp_path):
    folder = tmp_path / "views"
    made = write_views(refs, folder, Crops(3, (16, 24), 0), DecodeSettings(), lambda: False)
    listed = [json.loads(line)["path"] for line in made.read_text().splitlines()]
    assert listed == [str(view_path(folder, ref.uri, view)) for ref in refs[:2] for view in range(3)]
    images = [decode_rgb(Path(path).read_bytes()) for path in listed]
    assert all(image.size == (24, 16) for image in images)
    assert len({image.tobytes() for image in images}) == 6


def test_the_seed_alone_decides_them(refs, tmp_path):
    def written(name, order, seed):
        folder = tmp_path / name
        write_views(order, folder, Crops(2, (16, 16), seed), DecodeSettings(), lambda: False)
        return [view_path(folder, ref.uri, view).read_bytes() for ref in refs[:2] for view in range(2)]

    assert written("a", refs, 0) == written("b", refs[::-1], 0)
    assert written("a2", refs, 0) != written("c", refs, 1)


def test_a_photo_that_has_moved_has_the_same_views(refs, tmp_path):
    moved = tmp_path / "elsewhere.png"
    moved.write_bytes(Path(refs[0].uri).read_bytes())
    folder = tmp_path / "views"
    write_views(
        [refs[0], InputRef(str(moved), str(moved).encode())],
        folder,
        Crops(1, (16, 16), 0),
        DecodeSettings(),
        lambda: False,
    )
    first, second = (view_path(folder, uri, 0).read_bytes() for uri in (refs[0].uri, str(moved)))
    assert first == second


def test_a_finished_list_is_kept_and_an_unfinished_one_made_again(refs, tmp_path):
    folder = tmp_path / "views"
    with pytest.raises(JobStopped, match="0 photos"):
        write_views(refs, folder, Crops(1, (16, 16), 0), DecodeSettings(), lambda: True)
    (folder / "left-over.jpg").touch()
    write_views(refs, folder, Crops(1, (16, 16), 0), DecodeSettings(), lambda: False)
    assert not (folder / "left-over.jpg").exists()
    first = view_path(folder, refs[0].uri, 0)
    first.unlink()
    write_views(refs, folder, Crops(1, (16, 16), 0), DecodeSettings(), lambda: False)
    assert not first.exists()
