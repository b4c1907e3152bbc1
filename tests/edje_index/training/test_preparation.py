"""Preparation of captions in shards: the data are those of the models, and finished
shards are prepared once.
"""

from __future__ import annotations

import threading
from dataclasses import fields, replace

import numpy as np
import pytest
from open_clip.tokenizer import basic_clean, canonicalize_text
from transformers import PreTrainedTokenizerFast

from edje_index.bundles.bundle import ModelBundle
from edje_index.training import captions as caption_shards
from edje_index.training.batches import text_rows
from edje_index.training.captions import CaptionSet, TrainingData
from edje_index.training.workers import WorkerGroup
from storage_formats.errors import CorruptIndexError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.training.conftest import IMAGES, prepare


def check_equal(one: TrainingData, other: TrainingData) -> None:
    for field in fields(TrainingData):
        left = getattr(one, field.name)
        right = getattr(other, field.name)
        assert left.dtype == right.dtype
        np.testing.assert_allclose(
            left, right, rtol=0, atol=1e-6 if left.dtype == np.float32 else 0
        )


@pytest.fixture
def small_shards(monkeypatch):
    """Five shards of the 48 captions."""
    monkeypatch.setattr(caption_shards, "SHARD_CAPTIONS", (10, 10))


def test_the_data_are_those_of_the_models(case):
    bundle = ModelBundle.load(case.bundle)
    data = TrainingData.open(case.data)
    texts = case.items.texts()
    np.testing.assert_allclose(
        data.text_embeddings, bundle.text.encode(texts), rtol=0, atol=1e-6
    )
    assert [
        data.caption(number) for number in range(len(texts))
    ] == bundle.joint.tokenizer.caption_ids(texts)
    np.testing.assert_array_equal(
        data.image_mining,
        read_embeddings(CommittedIndex.open(case.features), case.items.rows),
    )
    assert data.text_mining.tobytes() == data.text_embeddings.tobytes()
    assert data.caption_starts.tolist() == list(range(0, 2 * IMAGES + 1, 2))
    assert data.rows.tolist() == case.items.rows.tolist()
    equal = {
        tuple(np.flatnonzero(data.caption_keys == key)) for key in data.caption_keys
    }
    assert (0, 2) in equal, "the captions 'A dog .' and 'a dog' have the same words"


def test_captions_are_cleaned_and_cut_as_published(case, tmp_path):
    """Towers read `pre_caption` of a caption, and a row without an image has the
    published tokenizer's 64 tokens.
    """
    bundle = ModelBundle.load(case.bundle)
    bundle.joint.tokenizer.canonical = True
    bundle.save(tmp_path / "model")
    texts = ["A DOG, running - in_the Snow!", "word " * 30 + "dog " * 80]
    cleaned = [canonicalize_text(basic_clean(text)) for text in texts]
    changed = replace(
        case,
        bundle=tmp_path / "model",
        items=CaptionSet(case.items.rows[:2], [[text] for text in texts]),
    )
    assert prepare(tmp_path / "data", changed, miner=case.bundle)
    data = TrainingData.open(tmp_path / "data")
    towers = ModelBundle.load(case.bundle).text
    for embeddings in (
        data.text_embeddings,
        data.text_mining,
        ModelBundle.load(tmp_path / "model").text.encode(texts),
    ):
        np.testing.assert_allclose(
            embeddings, towers.encode(cleaned), rtol=0, atol=1e-6
        )
    assert np.abs(towers.encode(texts) - towers.encode(cleaned)).max() > 1e-3
    published = PreTrainedTokenizerFast.from_pretrained(case.bundle / "joint")
    expected = published(cleaned, padding=True, truncation=True, max_length=64)[
        "input_ids"
    ]
    recovery = text_rows([data.caption(0), data.caption(1)], bundle.joint.tokenizer)
    assert recovery.input_ids.tolist() == expected
    assert len(expected[1]) == 64
    assert (
        bundle.joint.tokenizer.truncated(data.caption(1))
        == bundle.joint.tokenizer.caption_ids(texts)[1]
    )


def test_several_workers_and_another_mining_model_give_the_same_data(
    case, tmp_path, small_shards
):
    """The workers are threads. With a mining model, the captions have two
    embeddings.
    """
    barrier = threading.Barrier(3)
    flags = [False] * 3
    done = []

    class ThreadGroup(WorkerGroup):
        def any(self, flag: bool) -> bool:
            barrier.wait()
            flags[self.rank] = flag
            barrier.wait()
            return any(flags)

    def work(rank: int) -> None:
        done.append(
            prepare(
                tmp_path / "data", case, miner=case.bundle, group=ThreadGroup(rank, 3)
            )
        )

    # writes the table
    prepare(tmp_path / "data", case, miner=case.bundle, should_stop=lambda: True)
    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert done == [True] * 3
    check_equal(TrainingData.open(case.data), TrainingData.open(tmp_path / "data"))
    assert (tmp_path / "data" / "text_mining.npy").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_stopped_preparation_resumes_after_its_finished_shards(
    case, tmp_path, small_shards
):
    finished: list[tuple[int, int]] = []
    data = tmp_path / "data"
    options = {"on_shard": lambda *shards: finished.append(shards)}
    assert not prepare(data, case, should_stop=lambda: len(finished) == 2, **options)
    assert not data.exists()
    assert not prepare(data, case, should_stop=lambda: len(finished) == 4, **options)
    assert prepare(data, case, **options)
    assert finished == [(number, 5) for number in range(1, 6)]
    check_equal(TrainingData.open(case.data), TrainingData.open(data))
    assert prepare(data, case, should_stop=lambda: True), (
        "finished data need no preparation"
    )


def test_a_damaged_shard_is_found_and_prepared_again(case, tmp_path, small_shards):
    data = tmp_path / "data"
    finished = []
    assert not prepare(
        data,
        case,
        should_stop=lambda: len(finished) == 2,
        on_shard=lambda *_: finished.append(0),
    )
    path = tmp_path / ".data.part" / "00000001.npz"
    content = path.read_bytes()
    # among the numbers
    middle = content.index(b"text_embeddings.npy") + 400
    path.write_bytes(
        content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    )
    with pytest.raises(
        CorruptIndexError, match=r"00000001.npz was damaged; train again"
    ):
        prepare(data, case)
    prepare(data, case)
    check_equal(TrainingData.open(case.data), TrainingData.open(data))
