"""Filter tables: filters give the same rows with and without them, also after changes
and damage.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edje_index.search.rows import IndexRows
from pipelines import (
    copy_index,
    delete_rows,
    repair_index,
)
from pipelines.jobs.snapshots import remove_snapshots, set_columns
from storage_formats import (
    CorruptIndexError,
    IndexWriter,
    Manifest,
    verify_index,
)
from storage_formats.format.filter_tables import iter_filter_table
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.format.tombstones import live_rows

ROWS = 37
SHARD_SIZE = 8
FILTERS = (
    "size > 20",
    "captions = 'cat 3' or captions like 'dog%'",
    "row_id in (0, 7, 8, 36)",
    "content_hash is not null and size < 4",
    "score is null",
    "title = 'sea'",
    "uri like '%1'",
)


def write_index(root: Path) -> Path:
    """An index of five shards with source columns."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((ROWS, 4), dtype=np.float32)
    columns = {
        "uri": [f"/photos/{row}" for row in range(ROWS)],
        "size": list(range(ROWS)),
        "content_hash": [f"{row:064x}" for row in range(ROWS)],
        "score": [None if row % 3 else row / 2 for row in range(ROWS)],
        "captions": [
            [f"cat {row % 5}", f"dog {row}"][: row % 3] for row in range(ROWS)
        ],
        "title": ["hill"] * ROWS,
    }
    with IndexWriter.create(
        root, block_shape=(2, 8), embed_dim=4, shard_size=SHARD_SIZE
    ) as writer:
        blocks = rng.standard_normal((ROWS, 2, 8), dtype=np.float32)
        writer.append(blocks, embeddings, columns)
    return root


def passing(root: Path) -> dict[str, list[Any]]:
    """The rows that pass each filter, and the columns of all rows as hits."""
    index = CommittedIndex.open(root)
    rows = IndexRows(index)
    hits = live_rows(index)[::-1]
    return {
        "hits": rows.described(hits, ["title", "captions", "score", "row_id"]),
        **{each: np.flatnonzero(rows.passing(each)).tolist() for each in FILTERS},
    }


def passing_without(root: Path, tmp_path: Path) -> dict[str, list[int]]:
    """The same for a copy of the index whose manifest names no filter table."""
    folder = tmp_path / "without"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root, folder)
    shutil.rmtree(folder / "filters")
    replace(Manifest.load(folder), filter_tables=()).write(Directory(folder))
    return passing(folder)


def test_filters_pass_the_same_rows_after_every_change(tmp_path):
    root = write_index(tmp_path / "index")
    assert len(Manifest.load(root).filter_tables) == 1
    results = [passing(root)]
    assert results[0] == passing_without(root, tmp_path)
    set_columns(root, [3, 30], {"title": ["sea", "sea"]})
    # a new column, which the table does not have
    set_columns(root, [4], {"score": [8.5]})
    delete_rows(root, [7, 31])
    results.append(passing(root))
    assert results[1]["title = 'sea'"] == [3, 30]
    assert results[1] == passing_without(root, tmp_path)
    delete_rows(root, [], erase=True)
    results.append(passing(root))
    assert results[2] == passing_without(root, tmp_path)
    assert results[2] == results[1]
    assert verify_index(root) == []
    remove_snapshots(root, 1)
    named = {each.path for each in Manifest.load(root).filter_tables if each}
    stored = {f"filters/{path.name}" for path in (root / "filters").iterdir()}
    assert named == stored
    copy_index(root, tmp_path / "copy")
    assert passing(tmp_path / "copy") == results[2]
    copy_index(root, tmp_path / "part", where="size > 10")
    assert verify_index(tmp_path / "part") == []


def test_columns_in_memory_hold_no_more_than_they_are_counted_for(tmp_path):
    rows = IndexRows(CommittedIndex.open(write_index(tmp_path / "index")))
    rows.described(np.arange(ROWS), ["uri", "captions", "score"])
    kept = sum(each.get_total_buffer_size() for each in rows._columns.values())
    assert kept <= 2 * rows._bytes


def test_two_writers_give_the_same_bytes(tmp_path):
    entries = [
        Manifest.load(write_index(tmp_path / name)).filter_tables for name in "ab"
    ]
    assert entries[0] == entries[1] != ()


def test_hits_open_no_file_of_a_shard(tmp_path):
    root = write_index(tmp_path / "index")
    index = CommittedIndex.open(root)
    hits = np.array([36, 0, 17])
    expected = [("/photos/36", {}), ("/photos/0", {}), ("/photos/17", {})]
    assert IndexRows(index, []).described(hits) == expected
    shutil.rmtree(root / "rows")
    assert IndexRows(index, []).described(hits) == expected
    with pytest.raises(CorruptIndexError, match="rows"):
        IndexRows(index, []).described(hits, ["content_hash"])


@pytest.mark.parametrize("damage", ["missing", "shorter", "other", "flipped"])
def test_a_damaged_table_is_passed_over_reported_and_repaired(tmp_path, damage):
    root = write_index(tmp_path / "index")
    before = passing(root)
    (path,) = (root / "filters").iterdir()
    data = path.read_bytes()
    changed = {
        "shorter": data[:-100],
        "other": b"x" * len(data),
        "flipped": data[:200] + bytes([data[200] ^ 1]) + data[201:],
    }
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    assert passing(root) == before
    assert [problem.path for problem in verify_index(root)] == [f"filters/{path.name}"]
    result = repair_index(root)
    assert [file.source for file in result.repaired] == ["the rows"]
    assert path.read_bytes() == data
    assert verify_index(root) == []


def test_a_table_of_other_rows_is_refused(tmp_path):
    root = write_index(tmp_path / "index")
    index = CommittedIndex.open(root)
    (segment,) = index.manifest.spec.used_segments
    (entry,) = index.manifest.filter_tables
    for other in (
        replace(segment, first_row=SHARD_SIZE),
        replace(segment, rows=ROWS + 1),
    ):
        with pytest.raises(CorruptIndexError, match="rows"):
            list(iter_filter_table(index, other, entry, ["size"]))


def test_an_index_without_tables_is_changed_as_before(tmp_path):
    root = write_index(tmp_path / "index")
    before = passing(root)
    shutil.rmtree(root / "filters")
    replace(Manifest.load(root), filter_tables=()).write(Directory(root))
    delete_rows(root, [7])
    assert not any(Manifest.load(root).filter_tables)
    assert passing(root) != before
    assert verify_index(root) == []


def test_the_number_of_tables_is_that_of_the_segments(tmp_path):
    root = write_index(tmp_path / "index")
    manifest = Manifest.load(root)
    replace(manifest, filter_tables=2 * manifest.filter_tables).write(Directory(root))
    with pytest.raises(CorruptIndexError, match="filter tables"):
        Manifest.load(root)
