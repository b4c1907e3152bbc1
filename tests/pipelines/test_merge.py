"""Merges: the rows of every index, their new ids, duplicates, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from edje_index.indexing.faiss_build import AnnRequest
from pipelines import JobStopped, delete_rows, merge_indexes
from pipelines.jobs.quantize import add_ann
from storage_formats import (
    IncompleteIndexError,
    IndexSpec,
    IndexWriter,
    Manifest,
    TokenStore,
    UsageError,
    read_rows,
    verify_index,
)
from storage_formats.format.checksum import json_checksum
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import live_rows
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import all_files, problems_and_counts, write_random_index
from tests.pipelines.conftest import SMALL
from tests.storage_formats.test_source_columns import ROWS, write_index


@pytest.fixture
def pair(tmp_path):
    """Two indexes. Row i of both has the same content hash, for the first 21 rows. Row
    5 failed in the left one.
    """
    left = tmp_path / "left"
    right = tmp_path / "right"
    blocks = write_random_index(
        left, SMALL, failed=frozenset({5}), duplicates=frozenset({9}), seed=1
    )
    others = write_random_index(
        right,
        replace(SMALL, rows=30),
        failed=frozenset({25}),
        duplicates=frozenset({29}),
        seed=2,
    )
    return left, right, blocks, others


def check_part(merged, part, rows, first):
    """The rows `rows` of the index `part` are in the merged index, with consecutive ids
    from `first` on.
    """
    row_ids = [first + number for number in range(len(rows))]
    for precision in Manifest.load(part).spec.precisions:
        with (
            TokenStore.open(merged, precision) as store,
            TokenStore.open(part, precision) as origin,
        ):
            assert (store.fetch_records(row_ids) == origin.fetch_records(rows)).all()
    embeddings = read_embeddings(CommittedIndex.open(merged), row_ids)
    np.testing.assert_array_equal(
        embeddings, read_embeddings(CommittedIndex.open(part), rows)
    )
    moved = read_rows(merged, row_ids).to_pylist()
    new_ids = dict(zip(rows, row_ids, strict=True))
    for row, original in zip(moved, read_rows(part, rows).to_pylist(), strict=True):
        if original["duplicate_of"] not in (None, *new_ids):
            assert (row["status"], row["reason"]) == ("failed", "original-deleted")
            continue
        original["row_id"] = new_ids[original["row_id"]]
        original["duplicate_of"] = new_ids.get(original["duplicate_of"])
        assert row == original


def test_rows_keep_their_content_and_get_consecutive_ids(pair, tmp_path, monkeypatch):
    left, right, *_ = pair
    delete_rows(left, rows=[3])
    delete_rows(right, rows=[22])
    # It compares every hash with every hash of strings.
    monkeypatch.setattr(np, "isin", None)
    before = all_files(tmp_path)
    out = tmp_path / "merged"
    result = merge_indexes([left, right], out)
    assert before.items() <= all_files(tmp_path).items()
    assert problems_and_counts(out) == []
    # Of the right rows 0 to 20, the left index has the contents, but 3 is deleted there
    # and 5 has failed. Row 29 of the right index is a duplicate of row 0, which is left
    # out: its own hash is new, though.
    duplicates = [row for row in range(21) if row not in (3, 5, 9)]
    kept_left = [row for row in range(21) if row != 3]
    kept_right = [row for row in range(30) if row != 22 and row not in duplicates]
    values = [(each["rows"], each["duplicates"]) for each in result.inputs]
    assert values == [(20, 0), (len(kept_right), 18)]
    assert (result.duplicates, result.removed, result.shards) == (18, 20, 5)
    assert result.rows == len(kept_left) + len(kept_right)
    # The rows of the right index begin with a new shard.
    assert live_rows(CommittedIndex.open(out)).tolist() == [
        *range(20),
        *range(24, 24 + len(kept_right)),
    ]
    check_part(out, left, kept_left, 0)
    check_part(out, right, kept_right, 24)
    manifest = Manifest.load(out)
    assert manifest.counts.failed == {"original-deleted": 1, "truncated": 2}
    assert (manifest.counts.inputs, manifest.counts.duplicates) == (31, 1)


def test_three_indexes_of_which_one_adds_nothing(pair, tmp_path):
    left, right, _, _ = pair
    third = shutil.copytree(left, tmp_path / "third")
    delete_rows(left, rows=[0, 1])
    merged = tmp_path / "merged"
    result = merge_indexes([left, right, third], merged)
    assert problems_and_counts(merged) == []
    # The contents of the rows 0, 1, 5 and 9 of the third index come from the right one,
    # and all others from the left one.
    assert [each["duplicates"] for each in result.inputs] == [0, 17, 21]
    check_part(merged, left, live_rows(CommittedIndex.open(left)).tolist(), 0)


def test_the_shard_size_is_that_of_the_first_index(pair, tmp_path):
    write_random_index(tmp_path / "other", replace(SMALL, shard_size=4))
    merged = tmp_path / "merged"
    merge_indexes([tmp_path / "other", pair[1]], merged)
    assert Manifest.load(merged).spec.shard_size == 4
    assert problems_and_counts(merged) == []
    check_part(merged, pair[1], list(range(21, 29)), 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precisions": ("bf16",)}, "precisions is .*fp8.* in .*left"),
        ({"block_shape": (2, 16)}, r"block shape is .2, 8. in .*left and .2, 16."),
        ({"embed_dim": 6}, "embeddings is 4 in .*left and 6 in .*other"),
    ],
)
def test_indexes_that_do_not_fit_are_refused(pair, tmp_path, changes, message):
    write_random_index(tmp_path / "other", replace(SMALL, **changes))
    with pytest.raises(UsageError, match=message):
        merge_indexes([pair[0], tmp_path / "other"], tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


def test_other_refusals(pair, tmp_path):
    left, right, *_ = pair
    out = tmp_path / "merged"
    for indexes, target, message in (
        ([left], out, "at least two indexes"),
        ([left, left.parent / "." / "left"], out, "given twice"),
        ([left, right], left, "left exists already"),
    ):
        with pytest.raises(UsageError, match=message):
            merge_indexes(indexes, target)
    value = json.loads((right / "index.json").read_text())
    value["model"] = {"fingerprint": "b" * 64}
    value["crc32c"] = json_checksum(value)
    (right / "index.json").write_text(json.dumps(value))
    with pytest.raises(UsageError, match=f"{'f' * 64} in .*left and {'b' * 64} in"):
        merge_indexes([left, right], tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


def stopping_after(calls):
    """Return a `ShouldStop` that returns True from the call number `calls` on."""
    counted = iter(range(10**9))
    return lambda: next(counted) >= calls


def test_a_stopped_merge_resumes_unless_an_index_has_changed(pair, tmp_path):
    left, right, *_ = pair
    out = tmp_path / "merged"
    for stop in (3, 2):
        with pytest.raises(JobStopped, match=r"of 32 rows are kept"):
            merge_indexes([left, right], out, should_stop=stopping_after(stop))
        with pytest.raises(IncompleteIndexError):
            verify_index(out)
    written = {path: path.stat().st_ino for path in out.glob("embeddings/c.*")}
    assert 1 <= len(written) < 5
    merge_indexes([left, right], out)
    assert not Layout(out).journal.exists()
    assert {path: path.stat().st_ino for path in written} == written
    with pytest.raises(JobStopped):
        merge_indexes([left, right], tmp_path / "again", should_stop=stopping_after(5))
    delete_rows(right, rows=[24])
    assert merge_indexes([left, right], tmp_path / "again").rows == 51 - 1 - 19
    assert problems_and_counts(tmp_path / "again") == []


def test_source_columns_are_united(tmp_path):
    write_index(tmp_path / "left", ROWS)
    write_index(tmp_path / "right", [{"rating": "high", "weight": 3}] * 6)
    merge_indexes([tmp_path / "left", tmp_path / "right"], tmp_path / "merged")
    rows = read_rows(tmp_path / "merged").to_pylist()
    assert [row["rating"] for row in rows] == ["3.0", "4.5", *[None] * 4, *["high"] * 6]
    assert [row["weight"] for row in rows] == [None] * 6 + [3] * 6
    assert rows[0]["captions"] == ROWS[0]["captions"]
    assert problems_and_counts(tmp_path / "merged") == []


def test_rows_without_a_content_hash_are_no_duplicates(tmp_path):
    parts = [tmp_path / "left", tmp_path / "right"]
    for part in parts:
        with IndexWriter.create(part, block_shape=(2, 4), embed_dim=3) as writer:
            writer.append(np.ones((5, 2, 4), "f4"), np.ones((5, 3), "f4"))
    result = merge_indexes(parts, tmp_path / "merged")
    assert (result.rows, result.duplicates) == (10, 0)


SPEC = IndexSpec(300, 64, (1, 2), 16)


@pytest.fixture
def root(tmp_path, one_faiss_thread):
    write_random_index(tmp_path / "index", SPEC, failed=frozenset({3, 130}))
    return tmp_path / "index"


@pytest.mark.parametrize(
    ("left", "right", "factory"),
    [
        ("IVF8,PQ8x4fs", "IVF8,PQ8x4fs", "IVF8,PQ8x4fs"),
        ("IVF8,PQ8x4fs", "IVF5,Flat", "Flat"),
        ("IVF8,PQ8x4fs", "auto", "Flat"),
    ],
)
def test_merges_keep_a_kind_that_all_indexes_have(root, left, right, factory):
    other = root.with_name("other")
    write_random_index(other, SPEC, seed=1)
    add_ann(root, AnnRequest(left, 0.8))
    add_ann(other, AnnRequest(right, 0.9))
    merge_indexes([root, other], root.with_name("merged"))
    ann = Manifest.load(root.with_name("merged")).ann
    assert ann.get("factory", "Flat") == factory
    assert ann.get("recall", {"target": 0.9})["target"] == 0.9
