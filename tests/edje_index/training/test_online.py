"""Online features: the values that an encoder gives each photo alone. Unreadable
photos are counted, never trained.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edje_index.bundles.bundle import ModelBundle
from edje_index.images.decode import decode_rgb
from edje_index.images.preprocessing import Preprocessor
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.inputs.input_lists import InputTable, write_input_table
from edje_index.inputs.refs import InputRef
from edje_index.models.adapter import build_adapter
from edje_index.training import loop
from edje_index.training.batches import BatchSource, Sampler
from edje_index.training.features import (
    OnlineFeatures,
    photo_view,
    unreadable_by_reason,
)
from edje_index.training.loop import open_start
from edje_index.training.step import JointObjective, Teacher
from edje_index.training.workers import WorkerGroup
from storage_formats.errors import EdjeError
from storage_formats.format.manifest import CommittedIndex
from tests.edje_index.training.conftest import IMAGES, Case

ROWS = IMAGES + 3


@dataclass(frozen=True)
class Photos:
    """Photos on disk, one per row of the index of `case`."""

    folder: Path
    case: Case
    encoder: ImageEncoder

    def path(self, row: int) -> Path:
        return self.folder / f"{row}.jpg"

    def features(self, views: int = 0) -> OnlineFeatures:
        index = CommittedIndex.open(self.case.features)
        inputs = InputTable(self.folder / "inputs.arrow")
        return OnlineFeatures(
            index,
            inputs,
            self.encoder,
            self.folder,
            0,
            ThreadPoolExecutor(2),
            views=views,
            seed=7,
        )

    def source(self, **settings: object) -> BatchSource:
        return replace(self.case.source(**settings), features=self.features())


@pytest.fixture
def photos(case, tmp_path):
    bundle = ModelBundle.load(case.bundle)
    adapter = build_adapter(bundle.adapter.config.features(bundle.vision.num_patches))
    encoder = ImageEncoder(
        bundle.info, bundle.vision, adapter, Preprocessor(bundle.clip_config)
    )
    made = Photos(tmp_path, case, encoder)
    rng = np.random.default_rng(0)
    for row in range(ROWS):
        pixels = rng.integers(0, 255, (40 + row, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(made.path(row))
    paths = [made.path(row) for row in range(ROWS)]
    refs = [
        InputRef(str(path), bytes(path), size=path.stat().st_size) for path in paths
    ]
    assert write_input_table(tmp_path / "inputs.arrow", refs) == ROWS
    return made


def alone(photos: Photos, row: int) -> torch.Tensor:
    """Features of one photo by the encoder of a build."""
    pixels = photos.encoder.preprocess(decode_rgb(photos.path(row).read_bytes()))
    return torch.from_numpy(photos.encoder.encode(pixels[None])[0].astype(np.float32))[
        0
    ]


def test_features_are_those_of_a_build(photos):
    # more than one batch of the tower
    rows = np.array([5, 0, 26, 5, *range(1, 20), *range(20, 26), *range(10)])
    features = photos.features()
    fetched, _ = features.fetch(rows)
    assert fetched.dtype == torch.bfloat16
    for row, values in zip(rows.tolist(), fetched.float(), strict=True):
        torch.testing.assert_close(values, alone(photos, row), rtol=0.01, atol=1e-4)
    torch.testing.assert_close(features.finish(features.load(rows)[0]), fetched)


def test_the_workers_of_a_machine_share_its_cpus_for_decoding(
    photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "usable_cpus", lambda: 8)
    task = replace(
        photos.case.task(tmp_path / "run"), inputs=photos.folder / "inputs.arrow"
    )
    pools = []
    for size, on_machine in ((1, 1), (4, 1), (4, 4), (32, 16)):
        group = WorkerGroup(0, size, on_machine)
        _, source = open_start(task, group, torch.device("cpu"))
        pools.append(source.features.pool._max_workers)
    assert pools == [8, 8, 2, 1]


def test_views_are_the_crops_that_a_stored_view_has(photos):
    size = photos.encoder.vision.image_size
    data = photos.path(4).read_bytes()
    rows = np.array([4 * 3 + 1, 9 * 3])
    photo = decode_rgb(data)
    values, is_readable = photos.features(3).load(rows)
    assert is_readable.all()
    expected = photos.encoder.preprocess(photo_view(photo, data, 1, size, 7))
    assert torch.equal(values[0], expected)
    other = photos.encoder.preprocess(photo_view(photo, data, 2, size, 7))
    assert not torch.equal(values[0], other)
    source = replace(
        photos.source(),
        views=(photos.features(3), np.arange(ROWS * 3).reshape(-1, 3)[2:-1]),
    )
    batch = source.with_features(source.joint(0))
    assert batch.patches.shape == (8, 16, 32)
    assert not torch.equal(
        batch.patches, photos.source().with_features(photos.source().joint(0)).patches
    )


def test_an_unreadable_image_is_named_and_blank(photos):
    photos.path(3).unlink()
    photos.path(5).write_bytes(photos.path(6).read_bytes())
    # same size, but not its end
    photos.path(7).write_bytes(photos.path(7).read_bytes()[:-100] + bytes(100))
    features = photos.features()
    for _ in range(2):
        values, is_readable = features.load(np.array([2, 3, 5, 7]))
        assert is_readable.tolist() == [True, False, False, True]
        assert not values[1:3].any()
    lines = [
        json.loads(line)
        for line in (photos.folder / "unreadable-0.jsonl").read_text().splitlines()
    ]
    assert sorted((line["uri"], line["reason"]) for line in lines) == [
        (str(photos.path(3)), "missing"),
        (str(photos.path(5)), "changed-since-plan"),
    ]
    fetched, readable = features.fetch(np.array([2, 3, 5, 7]))
    assert readable.tolist() == is_readable.tolist()
    assert torch.equal(fetched[[0, 3]], features.fetch(np.array([2, 7]))[0])
    assert unreadable_by_reason(photos.folder) == {
        "changed-since-plan": 1,
        "missing": 1,
    }


def test_a_pair_without_its_image_is_replaced_by_another_pair(photos):
    before = photos.source().joint(0)
    images, captions = Sampler(photos.source().data, 8, 0).pairs(0)
    for position in (2, 7):
        photos.path(int(photos.source().data.rows[images[position]])).unlink()
    source = photos.source()
    batch = source.joint(0)
    k = 2
    chosen = {position: position for position in range(8)} | {2: 3, 7: 0}

    def rows(batch):
        """The image and the padded caption of the rows of each pair."""
        [chunk] = batch.chunks
        flat = torch.cat(
            [bucket.input_ids.flatten() for bucket, _ in chunk.rows.buckets]
        )
        images = torch.cat([images for _, images in chunk.rows.buckets])
        starts = chunk.rows.starts
        images = images[starts.argsort().argsort()[: 8 * (2 + 2 * k)]].tolist()
        sep = source.tokenizer.special_id("sep_token")
        shown = []
        for image, start in zip(images, starts.tolist(), strict=False):
            end = start + flat[start:].tolist().index(sep)
            shown.append((image, tuple(flat[start:end].tolist())))
        for pair in range(8):
            yield [
                shown[pair],
                *shown[8 + k * pair : 8 + k * (pair + 1)],
                *shown[8 + 8 * k + k * pair : 8 + 8 * k + k * (pair + 1)],
            ]

    by_image = {pair[0][0]: pair for pair in rows(before)}
    assert sorted(rows(batch)) == sorted(by_image[at] for at in chosen.values())
    assert len(captions) == 8
    aligned = source.alignment(np.ones(1000, dtype=bool))(0)
    assert len(aligned.patches) == IMAGES - 2
    assert aligned.shares.shape[1] == (IMAGES - 2) * source.config.alignment.captions


def test_an_unreadable_image_is_no_negative(photos):
    """What stands in its place has no effect on a loss or a gradient."""
    source = replace(photos.source(), teacher_tokens=4)
    images, _ = Sampler(source.data, 8, 0).pairs(0)
    whole = source.with_features(source.joint(0))
    photos.path(int(source.data.rows[images[0]])).unlink()
    batch = source.with_features(source.joint(0))
    [chunk] = batch.chunks
    assert 0 in chunk.negative_images
    bundle = ModelBundle.load(photos.case.bundle)
    bundle.adapter.requires_grad_(True)
    teacher = Teacher(
        ModelBundle.load(photos.case.bundle).joint,
        build_adapter(bundle.adapter.config),
        torch.device("cpu"),
    )
    objective = JointObjective(
        bundle.adapter, bundle.joint, source.config.objective, None, teacher
    ).eval()

    def step(patches):
        objective.zero_grad()
        losses = objective.backward(replace(batch, patches=patches))
        return losses, [p.grad for p in objective.parameters() if p.grad is not None]

    assert not torch.equal(batch.patches[0], whole.patches[0])
    for left, right in zip(step(batch.patches), step(whole.patches), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_a_batch_without_any_image_says_what_to_do(photos):
    for row in range(ROWS):
        photos.path(row).write_bytes(b"no image")
    for make in (
        photos.source().joint,
        photos.source().alignment(np.ones(1000, dtype=bool)),
    ):
        with pytest.raises(
            EdjeError, match=r"none of the images .* restore the image files"
        ):
            make(0)
