"""Compactions: the rows that are left, their new ids, damage, and stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines import JobStopped, compact_index, delete_rows
from pipelines.jobs.snapshots import remove_snapshots, roll_back
from storage_formats import (
    CorruptIndexError,
    IndexSpec,
    Manifest,
    RowIdError,
    TokenStore,
    UsageError,
    read_rows,
    verify_index,
)
from storage_formats.format.checksum import json_checksum
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import problems_and_counts, same_bits, write_random_index

SPEC = IndexSpec(
    rows=37, shard_size=8, block_shape=(2, 8), embed_dim=4, precisions=("bf16", "fp8")
)
# duplicates of row 0
FAILED = frozenset({5, 20})
DUPLICATES = frozenset({9, 30})


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    return root, write_random_index(root, SPEC, failed=FAILED, duplicates=DUPLICATES)


def check_rows(root: Path, blocks: np.ndarray, kept: list[int]) -> None:
    """The index holds the rows `kept` of the original index, whose blocks are
    `blocks`, and translates their ids.
    """
    assert problems_and_counts(root) == []
    for precision in SPEC.precisions:
        with TokenStore.open(root, precision) as store:
            new = store.translate(range(SPEC.rows))
            assert [row for row in range(SPEC.rows) if new[row] >= 0] == kept
            assert store.row_ids().tolist() == new[kept].tolist()
            if precision == "bf16":
                assert same_bits(store.fetch(new[kept]), blocks[kept])
            else:
                with TokenStore.open(root, precision, snapshot=0) as before:
                    assert (
                        store.fetch_records(new[kept]) == before.fetch_records(kept)
                    ).all()
    now = CommittedIndex.open(root)
    before = CommittedIndex.open(root, snapshot=0)
    np.testing.assert_array_equal(
        read_embeddings(now, new[kept]), read_embeddings(before, kept)
    )
    lines = read_rows(root).to_pylist()
    assert [line["uri"] for line in lines] == [f"/photos/{row}.jpg" for row in kept]
    assert [line["size"] for line in lines] == kept


def test_the_other_rows_are_copied(index):
    root, blocks = index
    files = {
        path: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".json"
    }
    delete_rows(root, rows=[1, 8, 20, 36])
    result = compact_index(root)
    kept = [row for row in range(SPEC.rows) if row not in (1, 8, 20, 36)]
    assert (
        result.rows,
        result.removed,
        result.first_row,
        result.shards,
        result.snapshot,
    ) == (33, 4, 40, 5, 2)
    check_rows(root, blocks, kept)
    assert {path: path.read_bytes() for path in files} == files
    manifest = Manifest.load(root)
    assert (
        manifest.counts.indexed,
        manifest.counts.duplicates,
        manifest.counts.failed,
    ) == (30, 2, {"truncated": 1})
    assert [
        row["duplicate_of"]
        for row in read_rows(root).to_pylist()
        if row["status"] == "duplicate"
    ] == [40, 40]
    with pytest.raises(
        RowIdError, match=r"39 is below 40.*a compaction renumbered the row.*translate"
    ):
        TokenStore.open(root).fetch([50, 39])
    for call in (lambda: read_rows(root, [3]), lambda: delete_rows(root, rows=[3])):
        with pytest.raises(RowIdError, match="3 is below 40"):
            call()
    again = compact_index(root)
    assert (again.removed, again.row_map, again.snapshot) == (0, None, 2)
    with TokenStore.open(root, snapshot=0) as store:
        assert same_bits(store.fetch([1, 8]), blocks[[1, 8]])
    remove_snapshots(root, 1)
    assert problems_and_counts(root) == []
    assert sorted(path.name for path in (root / "rows").iterdir()) == [
        f"{shard:08d}.parquet" for shard in range(5, 10)
    ]


def test_maps_of_several_compactions_follow_one_another(index):
    root, blocks = index
    left = list(range(SPEC.rows))
    rng = np.random.default_rng(0)
    for _ in range(3):
        chosen = rng.choice(left, 6, replace=False).tolist()
        with TokenStore.open(root) as store:
            delete_rows(root, rows=store.translate(chosen).tolist())
        compact_index(root)
        left = [row for row in left if row not in chosen]
        check_rows(root, blocks, left)
    roll_back(root, 2)
    assert (
        TokenStore.open(root).translate(range(SPEC.rows)) >= 0
    ).sum() == SPEC.rows - 6
    assert problems_and_counts(root) == []


def test_a_duplicate_without_its_original_is_a_failed_row(index):
    root, _ = index
    delete_rows(root, rows=[0, 9])
    compact_index(root)
    manifest = Manifest.load(root)
    assert (manifest.counts.duplicates, manifest.counts.failed) == (
        0,
        {"original-deleted": 1, "truncated": 2},
    )
    (line,) = [
        row
        for row in read_rows(root).to_pylist()
        if row["reason"] == "original-deleted"
    ]
    assert (line["uri"], line["status"], line["duplicate_of"]) == (
        "/photos/30.jpg",
        "failed",
        None,
    )
    assert problems_and_counts(root) == []


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "file", ["tokens/bf16/c.1.0.0", "rows/00000001.parquet", "embeddings/c.1.0"]
)
def test_damage_is_never_copied(index, file):
    root, _ = index
    delete_rows(root, rows=[8])
    manifest = (root / "index.json").read_bytes()
    flip(root / file, 100)
    with pytest.raises(
        JobStopped, match=Path(file).name if "bf16" not in file else "row 11 is damaged"
    ):
        compact_index(root)
    assert (root / "index.json").read_bytes() == manifest
    flip(root / file, 100)
    assert compact_index(root).rows == 36
    assert problems_and_counts(root) == []


def test_an_index_without_rows_is_refused(index):
    root, _ = index
    delete_rows(root, rows=range(SPEC.rows))
    with pytest.raises(UsageError, match="all its rows are deleted"):
        compact_index(root)


def test_a_row_that_was_renumbered_and_erased_has_no_id(index):
    root, _ = index
    delete_rows(root, rows=[3], erase=True)
    moved = int(TokenStore.open(root).translate([4])[0])
    delete_rows(root, rows=[moved], erase=True)
    # the index has fewer rows than the old id
    row_ids = np.array([3, 4, moved, 10**6, 1 << 63], dtype=np.uint64)
    assert (TokenStore.open(root).translate(row_ids) == -1).all()
    assert TokenStore.open(root).translate([-1, -(10**6)]).tolist() == [-1, -1]


@pytest.mark.parametrize("harm", ["flipped", "not a map"])
def test_a_damaged_row_map_is_one_clear_error(index, harm):
    root, _ = index
    delete_rows(root, rows=[3])
    path = Path(compact_index(root).row_map)
    if harm == "flipped":
        flip(path, 50)
    else:
        value = json.loads((root / "index.json").read_text())
        value["row_maps"][0] = {**value["shard_table"], "first_row": 40}
        (root / "index.json").write_text(
            json.dumps({**value, "crc32c": json_checksum(value)})
        )
    with pytest.raises(CorruptIndexError, match=r"row.map"):
        TokenStore.open(root).translate([1])
    assert "row-map" in [problem.code for problem in verify_index(root)]
    assert Layout(root).manifest.exists()
