"""Rows files: what a change writes, what it leaves as it is, and what damage does."""

from __future__ import annotations

import operator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.search.rows import IndexRows
from pipelines import compact_index, copy_index, delete_rows
from pipelines.jobs.snapshots import remove_snapshots, set_columns
from storage_formats import (
    CorruptIndexError,
    Manifest,
    read_rows,
    verify_index,
)
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import ROWS_FILE, Segment
from storage_formats.format.manifest import CommittedIndex, RowsFile
from storage_formats.format.places import Directory
from storage_formats.format.rows import (
    SOURCE_VALUES,
    RowEntry,
    rows_table,
    write_rows,
)
from storage_formats.format.shard_table import write_named_file
from storage_formats.format.tombstones import live_rows
from storage_formats.writing.rows_files import write_rows_files
from tests.conftest import rows_path, write_arrays

ROWS = 37
SHARD_SIZE = 8
FILTERS = {
    "size > 20": set(range(21, ROWS)),
    "captions like 'dog 2%'": {
        row for row in range(ROWS) if row % 3 == 2 and str(row).startswith("2")
    },
    "row_id in (0, 7, 8, 36)": {0, 7, 8, 36},
    "score is null": {row for row in range(ROWS) if row % 3},
    "title = 'sea'": set(),
    "uri like '%1'": {1, 11, 21, 31},
}


@pytest.fixture(params=["one file", "many files"])
def layouts(request, monkeypatch):
    if request.param == "many files":
        monkeypatch.setattr("storage_formats.writing.rows_files._GROUP_ROWS", 5)
        monkeypatch.setattr("storage_formats.writing.rows_files._FILE_ROWS", 12)


def write_index(root):
    """An index of five shards with source columns."""
    rng = np.random.default_rng(0)
    rows = range(ROWS)
    columns = {
        "uri": [f"/photos/{row}" for row in rows],
        "size": list(rows),
        "score": [None if row % 3 else row / 2 for row in rows],
        "captions": [[f"cat {row % 5}", f"dog {row}"][: row % 3] for row in rows],
        "title": ["hill"] * ROWS,
    }
    blocks = rng.standard_normal((ROWS, 2, 8), dtype=np.float32)
    embeddings = rng.standard_normal((ROWS, 4), dtype=np.float32)
    write_arrays(root, blocks, embeddings, columns, shard_size=SHARD_SIZE)
    return root


@pytest.fixture
def root(tmp_path):
    return write_index(tmp_path / "index")


def passing(root):
    """The rows that pass each filter."""
    rows = IndexRows(CommittedIndex.open(root))
    return {each: {*np.flatnonzero(rows.passing(each)).tolist()} for each in FILTERS}


def hits(root):
    """Columns of all rows as hits, in descending order, read twice."""
    index = CommittedIndex.open(root)
    rows = IndexRows(index)
    row_ids = live_rows(index)[::-1]
    first, again = (
        rows.described(row_ids, ["title", "score", "row_id"]) for _ in range(2)
    )
    assert first == again
    return first


@pytest.mark.usefixtures("layouts")
def test_filters_and_hits_are_those_of_the_rows_after_every_change(tmp_path):
    root = write_index(tmp_path / "index")
    assert passing(root) == FILTERS
    set_columns(root, [3, 30], {"title": ["sea", "sea"]})
    set_columns(root, [4], {"score": [8.5]})
    delete_rows(root, [7, 31])
    expected = {name: rows - {7, 31} for name, rows in FILTERS.items()}
    expected["title = 'sea'"] = {3, 30}
    expected["score is null"] -= {4}
    assert passing(root) == expected
    before = hits(root)
    assert before[-4][1] == {"title": "sea", "score": 1.5, "row_id": 3}
    assert len(before) == ROWS - 2
    delete_rows(root, [], erase=True)
    assert passing(root) == expected
    assert hits(root) == before
    assert verify_index(root) == []
    remove_snapshots(root, 1)
    named = {each.file.path for each in Manifest.load(root).rows_files}
    assert named == {f"rows/{path.name}" for path in (root / "rows").iterdir()}
    copy_index(root, tmp_path / "copy")
    assert passing(tmp_path / "copy") == expected
    copy_index(root, tmp_path / "part", where="size > 10")
    compact_index(root, tmp_path / "dense")
    assert verify_index(tmp_path / "part") == verify_index(tmp_path / "dense") == []


def test_an_edit_writes_only_the_files_with_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("storage_formats.writing.rows_files._FILE_ROWS", 12)
    root = write_index(tmp_path / "index")
    before = Manifest.load(root).rows_files
    set_columns(root, [17], {"title": ["sea"]})
    after = Manifest.load(root).rows_files
    assert [each.first_shard for each in before] == [0, 2, 4]
    assert [each.first_shard for each in after] == [0, 2, 4]
    assert [*map(operator.eq, before, after)] == [True, False, True]
    delete_rows(root, [17])
    assert Manifest.load(root).rows_files == after
    assert all((root / each.file.path).exists() for each in (*before, *after))


def test_new_files_take_over_the_small_files_before_them(root):
    """A hundred appends of one row leave few files, and few write much."""
    index = CommittedIndex.open(root)
    layout = Directory(root)
    layout.staged_rows(0).parent.mkdir(parents=True, exist_ok=True)
    written = 0

    def rows(file):
        return pq.read_metadata(root / file.file.path).num_rows

    for shard in range(5, 105):
        first = shard * SHARD_SIZE
        segments = (*index.spec.used_segments, Segment(first, 1))
        spec = replace(index.spec, rows=first + 1, segments=segments)
        path = layout.staged_rows(shard)
        write_rows(path, rows_table([RowEntry(first, f"{shard}")]))
        staged = {shard: (layout, FileEntry.of(layout, path))}
        files = write_rows_files(layout, spec, index.manifest.columns, staged, index)
        written += sum(map(rows, {*files} - {*index.manifest.rows_files}))
        manifest = replace(index.manifest, spec=spec, rows_files=files)
        index = replace(index, manifest=manifest)
        assert len(files) <= 10
    assert written < 100 * 6
    assert sum(map(rows, files)) == ROWS + 100


def test_row_groups_and_files_end_at_a_size_in_bytes(root, monkeypatch):
    monkeypatch.setattr("storage_formats.writing.rows_files._GROUP_BYTES", 2000)
    monkeypatch.setattr("storage_formats.writing.rows_files._FILE_BYTES", 6000)
    set_columns(root, range(ROWS), {"title": ["x" * 400] * ROWS})
    files = Manifest.load(root).rows_files
    assert len(files) > 1
    for each in files:
        metadata = pq.read_metadata(root / each.file.path)
        for number in range(metadata.num_row_groups):
            assert metadata.row_group(number).num_rows < SHARD_SIZE
    assert len(passing(root)["size > 20"]) == ROWS - 21
    assert verify_index(root) == []


def test_row_groups_in_memory_take_no_more_than_they_are_counted_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("storage_formats.writing.rows_files._GROUP_ROWS", 5)
    rows = IndexRows(CommittedIndex.open(write_index(tmp_path / "index")))
    rows.described(np.arange(ROWS), ["uri", "captions", "score"])
    groups = rows._cached[1].values()
    assert len(groups) == 5
    counted = sum(each.bytes for each in groups)
    columns = [column for each in groups for column in each.columns.values()]
    assert sum(each.get_total_buffer_size() for each in columns) <= 2 * counted
    monkeypatch.setattr("edje_index.search.rows._CACHED_BYTES", counted // 2)
    described = rows.described(np.array([36, 0]), ["size"])
    assert described == [(f"/photos/{row}", {"size": row}) for row in (36, 0)]
    assert len(rows._cached[0]) < 5


def commit_rows(root, table):
    """Make `table` the only rows file of an index."""
    layout = Directory(root)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    entry = write_named_file(layout, ROWS_FILE, sink.getvalue().to_pybytes())
    files = (RowsFile(0, entry),)
    replace(Manifest.load(root), rows_files=files).write(layout)


def with_column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, values)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(1),
        lambda table: table.slice(0, ROWS - 1),
        lambda table: table.sort_by([("row_id", "descending")]),
        lambda table: pa.concat_tables([table, table]),
        lambda table: table.drop_columns(["status"]),
        lambda table: with_column(
            table, "row_id", pa.array([None, *range(1, ROWS)], pa.int64())
        ),
        lambda table: with_column(table, "title", pa.array([b"x"] * ROWS)),
    ],
    ids=["first", "last", "order", "twice", "column", "null", "type"],
)
def test_files_of_strangers_are_checked(root, change):
    commit_rows(root, change(pq.read_table(rows_path(root))))
    with pytest.raises(CorruptIndexError, match="rows-"):
        read_rows(root)
    assert {problem.code for problem in verify_index(root)} >= {"rows"}


@pytest.mark.parametrize("text", ["[" * 100_000, "5", "x"])
def test_source_values_of_strangers_are_checked(root, text):
    values = pa.array([text] * ROWS, pa.string())
    commit_rows(
        root, with_column(pq.read_table(rows_path(root)), SOURCE_VALUES, values)
    )
    with pytest.raises(CorruptIndexError, match="source values"):
        set_columns(root, [1], {"title": ["sea"]})


@pytest.mark.parametrize("first_shards", [[], [1], [0, 0], [0, 3, 2], [0, 5]])
def test_files_that_do_not_follow_each_other_are_refused(root, first_shards):
    manifest = Manifest.load(root)
    entry = manifest.rows_files[0].file
    files = tuple(RowsFile(shard, entry) for shard in first_shards)
    replace(manifest, rows_files=files).write(Directory(root))
    with pytest.raises(CorruptIndexError, match=r"index\.json"):
        Manifest.load(root)
