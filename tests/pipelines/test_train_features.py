"""The indexes in the run folder of a training, the rows of its images in them, and
augmented views.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edje_index.bundles.bundle import ModelBundle
from edje_index.captions.reading import CaptionedImage
from edje_index.training.config import TrainSettings, validated
from edje_index.training.features import random_view
from pipelines.jobs.training.features import TrainJob, rows_of_all, stored_views
from pipelines.jobs.training.job import match_captions
from pipelines.progress.events import JobStopped
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.token_store import TokenStore
from tests.conftest import write_random_index


@pytest.fixture
def job(tmp_path, tiny_bundle):
    values = {
        "inputs": {"captions": ["train.jsonl"], "model": tiny_bundle},
        "run": {"out": tmp_path / "out", "device": "cpu", "threads": 1},
        "loop": {"steps": 1},
        "augmentation": {"views": 2},
    }
    return TrainJob(validated(TrainSettings, values), lambda event: None, lambda: False)


def test_images_that_cannot_be_read_are_named_with_what_to_do(
    job, tmp_path, tiny_bundle
):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"path": "nowhere/1.jpg"}\n{"path": "nowhere/2.jpg"}\n')
    with pytest.raises(EdjeError) as caught:
        job.build("features.edje", tiny_bundle, (str(wrong),), "features")
    message = str(caught.value)
    assert "none of the 2 inputs could be indexed (missing 2)" in message
    assert "nowhere/1.jpg (missing), " in message
    assert message.endswith(f"correct {wrong}, and run the command again")


def test_sources_are_archives_and_a_list_of_other_images(job, tmp_path):
    def item(path):
        return CaptionedImage(path, path, ("a photo",), None, path)

    job.folder.mkdir(parents=True)
    packed = [item("/a/X.TAR!0.jpg"), item("/a/y.zip!z/1.jpg"), item("/a/X.TAR!2.jpg")]
    packed.append(item("/a/z.parquet!image/3"))
    names = ("/a/X.TAR", "/a/y.zip", "/a/z.parquet")
    assert job.sources("list.jsonl", packed) == names
    file = tmp_path / "x.zip!1.jpg"
    file.touch()
    *archives, listed = job.sources("list.jsonl", [*packed, item(str(file))])
    assert archives == [*names]
    assert json.loads(Path(listed).read_text()) == {"path": str(file)}


def index(root: Path, rows: int, **damage: frozenset[int]) -> CommittedIndex:
    """An index of the rows /photos/0.jpg, /photos/1.jpg, ..."""
    write_random_index(root, IndexSpec(rows, 4, (2, 8), embed_dim=4), **damage)
    return CommittedIndex.open(root)


def items(*numbers: int) -> list[CaptionedImage]:
    return [
        CaptionedImage(
            f"{at}.jpg", f"/photos/{at}.jpg", (f"photo {at}",), None, str(at)
        )
        for at in numbers
    ]


def test_images_without_features_are_left_out(job, tmp_path):
    features = index(
        tmp_path / "features", 11, failed=frozenset({6}), duplicates=frozenset({9})
    )
    events = []
    job = replace(job, on_event=events.append)
    trained = items(10, 6, 9, 3)
    dev_items = items(6, 2)
    kept, captions, dev, counts = match_captions(job, features, trained, dev_items)
    assert [item.image_id for item in kept] == ["10", "9", "3"]
    assert captions.rows.tolist() == [10, 0, 3]
    assert captions.texts() == ["photo 10", "photo 9", "photo 3"]
    assert (dev.rows.tolist(), dev.texts()) == ([2], ["photo 2"])
    assert counts == {
        "images": 3,
        "captions": 3,
        "left_out": {"truncated": 1},
        "truncated": 0,
    }
    assert [str(event.text) for event in events] == [
        "images left out because they have no features: truncated 1"
    ]
    assert match_captions(job, features, items(1), [])[2] is None


def test_images_that_are_not_in_the_index_are_counted(job, tmp_path):
    features = index(tmp_path / "features", 5)
    with pytest.raises(
        UsageError,
        match=(
            r"1 of the 2 images of inputs.captions are not in .*features; build that"
        ),
    ):
        match_captions(job, features, items(0, 7), items(1, 8))
    with pytest.raises(
        UsageError, match="features lacks 1 training images; build that index from all"
    ):
        rows_of_all(features, items(3, 7))


@pytest.mark.parametrize(
    ("trained", "dev", "setting"), [([1, 2], [3], "captions"), ([3], [1, 2], "dev")]
)
def test_a_set_without_any_features_is_refused(job, tmp_path, trained, dev, setting):
    features = index(tmp_path / "features", 5, failed=frozenset({1, 2}))
    with pytest.raises(
        UsageError,
        match=(
            rf"none of the 2 images of inputs\.{setting} has features \(truncated 2\)"
        ),
    ):
        match_captions(job, features, items(*trained), items(*dev))


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
def test_a_view_is_most_of_the_photo_upright(width, height, seed):
    view = np.asarray(
        random_view(gradient(width, height), (32, 48), np.random.default_rng(seed))
    ).astype(float)
    assert view.shape == (32, 48, 3)
    across = view[:, :, 0].mean(axis=0)
    down = view[:, :, 1].mean(axis=1)
    mirrored = across[0] > across[-1]
    assert (np.diff(across[::-1] if mirrored else across) >= -1).all()
    assert (np.diff(down) >= -1).all()
    seen = (across.max() - across.min()) / 255 * (down.max() - down.min()) / 255
    longest = max(width / height, height / width)
    # crops of elongated photos are smaller, because the aspect ratio is limited
    assert seen > 0.35 / (longest * 4 / 3) - 0.25


def test_views_are_stored_per_photo_and_a_stopped_run_crops_again(
    job, tmp_path, tiny_bundle
):
    """Three photos: one is no image, and one has two captions."""
    for number in range(2):
        gradient(40 + number, 30).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"no image")
    paths = [tmp_path / f"{number}.png" for number in (1, 2, 0, 1)]
    captioned = [
        CaptionedImage(path.name, str(path), ("text",), None, path.name)
        for path in paths
    ]
    start = ModelBundle.load(tiny_bundle)
    job.folder.mkdir()
    with pytest.raises(JobStopped, match="after cropping 0 photos"):
        stored_views(
            TrainJob(job.settings, job.on_event, lambda: True), start, captioned
        )
    index, rows = stored_views(job, start, captioned)
    assert rows.tolist() == [[0, 1], [-1, -1], [4, 5], [0, 1]]
    blocks = TokenStore(index, "bf16").fetch([0, 1, 4, 5])
    assert len({block.tobytes() for block in blocks}) == 4
    assert not (job.folder / "views").exists()
    # without the cropped files
    assert stored_views(job, start, captioned)[1].tolist() == rows.tolist()
