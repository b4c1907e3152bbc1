"""The kind and the recall of the nearest-neighbour indexes that compactions and merges build."""

from __future__ import annotations

import pytest

from edje_index.indexing.faiss_index import AnnRequest, add_ann
from pipelines import compact_index, delete_rows, merge_indexes
from pipelines.progress.events import StatusMessage
from storage_formats import Manifest, verify_index
from storage_formats.format.layout import IndexSpec
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=300, shard_size=64, block_shape=(1, 2), embed_dim=16)
pytestmark = pytest.mark.usefixtures("one_faiss_thread")
CODES = AnnRequest("IVF8,PQ8x4fs", recall=0.9)


@pytest.fixture
def root(tmp_path):
    write_random_index(tmp_path / "index", SPEC, failed=frozenset({3, 130}))
    return tmp_path / "index"


def without_rows(root, row_ids):
    delete_rows(root, rows=row_ids)
    compact_index(root)
    return [root]


@pytest.mark.parametrize("requested", [CODES, AnnRequest("IVF5,Flat", recall=0.98)], ids=["codes", "exact"])
def test_copies_keep_the_kind_and_the_target_recall(root, requested):
    add_ann(root, requested)
    for copied in without_rows(root, list(range(0, 300, 4))):
        ann = Manifest.load(copied).ann
        assert (ann["factory"], ann["recall"]["target"]) == (requested.ann, requested.recall)
        assert verify_index(copied) == []
        assert ann["recall"] == add_ann(copied, requested).ann["recall"], "not measured for these rows"


@pytest.mark.parametrize(
    ("left", "right", "factory", "message"),
    [
        ("IVF8,PQ8x4fs", "IVF8,PQ8x4fs", "IVF8,PQ8x4fs", False),
        ("IVF8,PQ8x4fs", "IVF5,Flat", "Flat", True),
        ("IVF8,PQ8x4fs", "auto", "Flat", True),
        ("auto", "auto", "Flat", False),
    ],
)
def test_merges_keep_a_kind_that_all_indexes_have(root, left, right, factory, message):
    other, events = root.with_name("other"), []
    write_random_index(other, SPEC, seed=1)
    add_ann(root, AnnRequest(left, 0.8))
    add_ann(other, AnnRequest(right, 0.9))
    merge_indexes([root, other], root.with_name("merged"), on_event=events.append)
    ann = Manifest.load(root.with_name("merged")).ann
    assert ann.get("factory", "Flat") == factory
    assert ann.get("recall", {"target": 0.9})["target"] == 0.9
    texts = [event.text for event in events if isinstance(event, StatusMessage) and "kinds" in event.text]
    assert len(texts) == message


def test_copies_keep_the_small_codes_of_a_default_kind(root, monkeypatch):
    monkeypatch.setattr("edje_index.indexing.ann_kind.FLAT_LIMIT", 100)
    add_ann(root, AnnRequest(memory=round(1.2 * 300 * 10) + 1))  # enough for 4 parts, which need 2 bytes, and for ids
    assert Manifest.load(root).ann["factory"] == "IVF17,PQ4x4fs"
    for copied in without_rows(root, list(range(0, 300, 4))):
        assert Manifest.load(copied).ann["factory"] == "IVF15,PQ4x4fs"
