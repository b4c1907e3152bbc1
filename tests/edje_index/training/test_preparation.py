"""Preparation in chunks: the same data whatever the chunks, and an interrupted preparation goes on."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.data import preparation
from edje_index.training.data.dataset import CaptionSet, TrainingData
from edje_index.training.data.preparation import CaptionModels, Miner, prepare_data
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from tests.edje_index.training.conftest import IMAGES, captions

ITEMS = CaptionSet(np.arange(IMAGES) + 2, captions())


@pytest.fixture
def models(case):
    bundle = ModelBundle.load(case.bundle)
    miner = Miner(bundle.text, CommittedIndex.open(case.features), ITEMS.rows)
    return CaptionModels(bundle.joint.tokenizer, bundle.text, miner)


def check_equal(one: TrainingData, other: TrainingData) -> None:
    for field in fields(TrainingData):
        left, right = getattr(one, field.name), getattr(other, field.name)
        assert left.dtype == right.dtype
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6 if left.dtype == np.float32 else 0)


@pytest.mark.parametrize("chunk", [1, 7, 47])
def test_chunks_do_not_change_the_data(case, models, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(preparation, "CHUNK", chunk)
    prepare_data(tmp_path / "data", ITEMS, models)
    check_equal(TrainingData.open(case.data), TrainingData.open(tmp_path / "data"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_another_mining_model_has_its_own_embeddings(case, models, tmp_path):
    other = ModelBundle.load(case.bundle)
    miner = Miner(other.text, CommittedIndex.open(case.features), ITEMS.rows)
    prepare_data(tmp_path / "data", ITEMS, CaptionModels(models.tokenizer, models.text, miner))
    check_equal(TrainingData.open(case.data), TrainingData.open(tmp_path / "data"))
    assert (tmp_path / "data" / "text_mining.npy").stat().st_nlink == 1


def test_an_interrupted_preparation_goes_on_after_its_last_chunk(case, models, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "CHUNK", 10)

    def stop(_activity: str, done: int, _total: int) -> None:
        if done >= 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(tmp_path / "data", ITEMS, models, stop)
    assert not (tmp_path / "data").exists()
    reports = []
    prepare_data(tmp_path / "data", ITEMS, models, lambda *report: reports.append(report))
    assert [done for _, done, _ in reports] == [20, 30, 30, 40, 40, 48]
    check_equal(TrainingData.open(case.data), TrainingData.open(tmp_path / "data"))


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"count": 48}', b'{"count": 47, "captions": 40, "tokens": 1}'])
def test_a_damaged_record_begins_again(case, models, tmp_path, monkeypatch, damaged):
    (tmp_path / ".data.part").mkdir()
    (tmp_path / ".data.part" / "done.json").write_bytes(damaged)
    prepare_data(tmp_path / "data", ITEMS, models)
    check_equal(TrainingData.open(case.data), TrainingData.open(tmp_path / "data"))


def test_images_without_captions_are_refused(models, tmp_path):
    with pytest.raises(UsageError, match="no image with a caption"):
        prepare_data(tmp_path / "data", CaptionSet(np.zeros(0, np.int64), []), models)
