"""Preparation of captions in shards: the data are those of the models, and finished
shards are prepared once.
"""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from open_clip.tokenizer import basic_clean, canonicalize_text
from transformers import PreTrainedTokenizerFast

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import read_bundle_info
from edje_index.captions.matching import stored_captions
from edje_index.training import dataset
from edje_index.training.dataset import (
    StoredImages,
    open_same_images,
    read_captioned_rows,
)
from edje_index.training.workers import WorkerGroup
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import largest_file
from tests.edje_index.training.conftest import IMAGES, captioned_index, prepare

FILE = Path("train.npy")


def test_the_images_are_the_indexed_rows_with_captions(tmp_path):
    captions = [["a dog"], ["a cat", " . "], ["..."], ["a boy"], ["red"], ["a"], ["b"]]
    index = captioned_index(
        tmp_path / "data.edje",
        captions,
        failed=frozenset({5}),
        duplicates=frozenset({6}),
        split=["train", "restval", "train", "train", "train", "dev", None],
        image_id=["x", "x", None, None, None, "x", None],
    )
    data, hashes, left_out = read_captioned_rows(index, FILE)
    assert data.rows.tolist() == [2, 3, 7, 8]
    assert data.photos.tolist() == [2, 2, 2, 8]
    assert data.captions(0, 4) == [["a dog"], ["a cat"], ["a"], ["b"]]
    assert data.caption_starts.tolist() == [0, 1, 2, 3, 4]
    assert left_out == {"duplicate": 1, "no-caption": 3, "truncated": 1}
    assert read_captioned_rows(index, FILE, "train")[0].rows.tolist() == [2, 3]
    with pytest.raises(UsageError, match="of the split 'b'"):
        read_captioned_rows(index, FILE, "b")
    other = captioned_index(tmp_path / "other.edje", captions)
    others, other_hashes, _ = read_captioned_rows(other, FILE)
    assert data.digest != others.digest
    assert open_same_images(str(other.root), hashes[::-1]).rows.tolist() == [8, 7, 3, 2]
    with pytest.raises(UsageError, match=r"data\.edje lacks 1 training images"):
        open_same_images(str(index.root), [*hashes, other_hashes[3]])


def test_numbers_name_splits(tmp_path):
    captions = [["a dog"], ["a cat"], ["a boy"]]
    index = captioned_index(tmp_path / "data.edje", captions, split=[0, 1, None])
    assert read_captioned_rows(index, FILE, "1")[0].rows.tolist() == [3]
    assert [item.row_id for item in stored_captions(index, "1")] == [3]


@pytest.fixture
def miner(case, monkeypatch):
    """The images of `case`, as if its bundle had built their index."""
    info = read_bundle_info(case.bundle)
    monkeypatch.setattr(dataset, "matching_bundle", lambda index: info)
    return StoredImages(case.data.index, case.data.rows)


def check_equal(one, other):
    assert set(one.records.dtype.names) <= set(other.records.dtype.names)
    for name in one.records.dtype.names:
        np.testing.assert_allclose(
            one.records[name], other.records[name], rtol=0, atol=1e-6
        )


@pytest.fixture
def small_shards(monkeypatch):
    """Five shards of the 48 captions."""
    monkeypatch.setattr(dataset, "SHARD_IMAGES", 5)


def test_the_data_are_those_of_the_models(case):
    bundle = ModelBundle.load(case.bundle)
    data = case.data
    texts = case.texts()
    np.testing.assert_allclose(
        data.records["embedding"], bundle.text.encode(texts), rtol=0, atol=1e-6
    )
    ids = [data.caption(number) for number in range(len(texts))]
    assert ids == bundle.joint.tokenizer.caption_ids(texts)
    embeddings = read_embeddings(data.index, data.rows[[3, 0]])
    assert (data.embeddings(np.array([3, 0])) == embeddings).all()
    assert data.caption_starts.tolist() == list(range(0, 2 * IMAGES + 1, 2))
    keys = data.records["key"].tolist()
    # the captions 'A dog .' and 'a dog' have the same words
    assert keys[0] == keys[2] != keys[1]


def test_captions_are_cleaned_and_cut_as_published(case, miner, tmp_path):
    """Towers read `pre_caption` of a caption, and a row without an image has the
    published tokenizer's 64 tokens.
    """
    bundle = ModelBundle.load(case.bundle)
    bundle.joint.tokenizer.canonical = True
    bundle.save(tmp_path / "model")
    texts = ["A DOG, running - in_the Snow!", "word " * 30 + "dog " * 80]
    cleaned = [canonicalize_text(basic_clean(text)) for text in texts]
    index = captioned_index(tmp_path / "data.edje", [[text] for text in texts])
    data = read_captioned_rows(index, tmp_path / "train.npy")[0]
    changed = replace(case, bundle=tmp_path / "model", data=data)
    assert prepare(tmp_path / "train.npy", changed, miner=miner)
    towers = ModelBundle.load(case.bundle).text
    for embeddings in (
        data.records["embedding"],
        data.records["mining"],
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
    token_ids = [data.caption(0), data.caption(1)]
    recovery = bundle.joint.tokenizer.inputs_of_ids(token_ids, None)
    assert recovery.input_ids.tolist() == expected
    assert len(expected[1]) == 64
    assert (
        bundle.joint.tokenizer.truncated(data.caption(1))
        == bundle.joint.tokenizer.caption_ids(texts)[1]
    )


def test_several_workers_and_another_mining_model_give_the_same_data(
    case, miner, tmp_path, small_shards
):
    """The workers are threads. With a mining model, the captions have two
    embeddings.
    """
    barrier = threading.Barrier(3)
    flags = [False] * 3
    done = []

    class ThreadGroup(WorkerGroup):
        def any(self, flag):
            barrier.wait()
            flags[self.rank] = flag
            barrier.wait()
            return any(flags)

    def work(rank):
        done.append(
            prepare(
                tmp_path / "train.npy",
                case,
                miner=miner,
                group=ThreadGroup(rank, 3),
            )
        )

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert done == [True] * 3
    data = replace(case.data, path=tmp_path / "train.npy")
    check_equal(case.data, data)
    assert "mining" in data.records.dtype.names
    assert [path.name for path in tmp_path.iterdir()] == ["train.npy"]


def test_a_stopped_preparation_resumes_after_its_finished_shards(
    case, tmp_path, small_shards
):
    finished = []
    data = tmp_path / "train.npy"
    options = {"on_shard": lambda *shards: finished.append(shards)}
    assert not prepare(data, case, should_stop=lambda: len(finished) == 2, **options)
    assert not data.exists()
    assert not prepare(data, case, should_stop=lambda: len(finished) == 4, **options)
    # a damaged shard is prepared again
    path = sorted((tmp_path / "train.parts").iterdir())[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptIndexError, match=r"0005.npy was damaged; train again"):
        prepare(data, case)
    assert prepare(data, case, **options)
    assert finished == [(number, 5) for number in range(1, 6)]
    check_equal(case.data, replace(case.data, path=data))
    # finished data need no preparation
    assert prepare(data, case, should_stop=lambda: True)


@pytest.mark.parametrize(
    ("size", "file"), [(1000, "000000000000.npy"), (10_000, "train.npy")]
)
def test_an_error_of_the_disk_names_the_file(case, tmp_path, small_shards, size, file):
    """Of a shard, and of the joined file."""
    with largest_file(size), pytest.raises(OSError, match=f"File too large.*{file}"):
        prepare(tmp_path / "train.npy", case)
    assert prepare(tmp_path / "train.npy", case)
