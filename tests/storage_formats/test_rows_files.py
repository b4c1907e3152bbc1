"""Rows files: what a change writes, what it leaves as it is, and what damage does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.search.rows import IndexRows
from pipelines import compact_index, copy_index, delete_rows
from pipelines.jobs.snapshots import remove_snapshots, set_columns
from storage_formats import (
    CorruptIndexError,
    IndexWriter,
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
)
from storage_formats.format.shard_table import write_named_file
from storage_formats.format.tombstones import live_rows
from storage_formats.writing.rows_files import write_rows_files
from tests.conftest import rows_path

ROWS = 37
SHARD_SIZE = 8
APPENDS = 64
FILTERS = {
    "size > 20": set(range(21, ROWS)),
    "captions = 'cat 3' or captions like 'dog 2%'": {
        row for row in range(ROWS) if row % 3 and row % 5 == 3
    }
    | {row for row in range(ROWS) if row % 3 == 2 and str(row).startswith("2")},
    "row_id in (0, 7, 8, 36)": {0, 7, 8, 36},
    "content_hash is not null and size < 4": {0, 1, 2, 3},
    "score is null": {row for row in range(ROWS) if row % 3},
    "title = 'sea'": set(),
    "uri like '%1'": {1, 11, 21, 31},
}


@pytest.fixture(params=["one file", "many files"])
def layouts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many files":
        monkeypatch.setattr("storage_formats.writing.rows_files._GROUP_ROWS", 5)
        monkeypatch.setattr("storage_formats.writing.rows_files._FILE_ROWS", 12)


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


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_index(tmp_path_factory.mktemp("rows") / "index")


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """An index that a test may damage."""
    return Path(shutil.copytree(sound, tmp_path / "index"))


def passing(root: Path) -> dict[str, set[int]]:
    """The rows that pass each filter."""
    rows = IndexRows(CommittedIndex.open(root))
    return {each: {*np.flatnonzero(rows.passing(each)).tolist()} for each in FILTERS}


def hits(root: Path) -> list[Any]:
    """Columns of all rows as hits, in descending order, read twice."""
    index = CommittedIndex.open(root)
    rows = IndexRows(index)
    row_ids = live_rows(index)[::-1]
    described = rows.described(row_ids, ["title", "score", "row_id"])
    assert rows.described(row_ids[:2], ["title"])[0][0] == described[0][0]
    assert rows.described(row_ids, ["title", "score", "row_id"]) == described
    return described


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "values"),
    [
        (35, lambda shard: {"text": ["x" * 15_000] * 1024} if shard >= 30 else {}),
        (6, lambda shard: {"tags": [["a"] * 600] * 1024}),
    ],
    ids=["few long texts", "many items"],
)
def test_rows_of_uneven_sizes_are_read_back(tmp_path, shards, values):
    with IndexWriter.create(tmp_path, block_shape=(1, 16), embed_dim=4) as writer:
        for shard in range(shards):
            blocks = np.ones((1024, 1, 16), np.float32)
            writer.append(blocks, np.ones((1024, 4)), values(shard))
    assert verify_index(tmp_path) == []


def test_an_edit_writes_only_the_files_with_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("storage_formats.writing.rows_files._FILE_ROWS", 12)
    root = write_index(tmp_path / "index")
    before = Manifest.load(root).rows_files
    assert [each.first_shard for each in before] == [0, 2, 4]
    set_columns(root, [17], {"title": ["sea"]})
    after = Manifest.load(root).rows_files
    assert [each.first_shard for each in after] == [0, 2, 4]
    assert [left == right for left, right in zip(before, after, strict=True)] == [
        True,
        False,
        True,
    ]
    delete_rows(root, [17])
    assert Manifest.load(root).rows_files == after
    assert all((root / each.file.path).exists() for each in (*before, *after))


def test_new_files_take_over_the_small_files_before_them(tmp_path):
    """Many appends of one row leave few files, and few write much."""
    root = write_index(tmp_path / "index")
    index = CommittedIndex.open(root)
    layout = Directory(index.root)
    layout.staged_rows(0).parent.mkdir(parents=True, exist_ok=True)
    sizes = []
    for shard in range(5, 5 + APPENDS):
        spec = index.spec
        first = shard * SHARD_SIZE
        segments = (*spec.used_segments, Segment(first, 1))
        spec = replace(spec, rows=first + 1, segments=segments)
        table = rows_table([RowEntry(first, f"{shard}")])
        pq.write_table(table, layout.staged_rows(shard))
        staged = {shard: FileEntry.of(layout, layout.staged_rows(shard))}
        files = write_rows_files(layout, spec, index.manifest.columns, staged, index)
        kept = {*index.manifest.rows_files}
        sizes.append(
            sum(
                pq.read_metadata(root / each.file.path).num_rows
                for each in files
                if each not in kept
            )
        )
        index = replace(
            index, manifest=replace(index.manifest, spec=spec, rows_files=files)
        )
        assert len(files) <= 6
    assert sum(sizes) < APPENDS * 6
    assert sum(pq.read_metadata(root / each.file.path).num_rows for each in files) == (
        ROWS + APPENDS
    )


def test_row_groups_and_files_end_at_a_size_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("storage_formats.writing.rows_files._GROUP_BYTES", 2000)
    monkeypatch.setattr("storage_formats.writing.rows_files._FILE_BYTES", 6000)
    root = write_index(tmp_path / "index")
    set_columns(root, range(ROWS), {"title": ["x" * 400] * ROWS})
    files = Manifest.load(root).rows_files
    assert len(files) > 1
    for each in files:
        metadata = pq.read_metadata(root / each.file.path)
        groups = [
            metadata.row_group(number).num_rows
            for number in range(metadata.num_row_groups)
        ]
        assert max(groups) < SHARD_SIZE
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
    assert rows.described(np.array([36, 0]), ["size"]) == [
        ("/photos/36", {"size": 36}),
        ("/photos/0", {"size": 0}),
    ]
    assert len(rows._cached[0]) < 5


def commit_rows(root: Path, table: pa.Table) -> None:
    """Make `table` the only rows file of an index."""
    layout = Directory(root)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    entry = write_named_file(layout, ROWS_FILE, sink.getvalue().to_pybytes())
    files = (RowsFile(0, entry),)
    replace(Manifest.load(root), rows_files=files).write(layout)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(1),
        lambda table: table.slice(0, ROWS - 1),
        lambda table: table.sort_by([("row_id", "descending")]),
        lambda table: pa.concat_tables([table, table]),
        lambda table: table.drop_columns(["status"]),
        lambda table: table.set_column(
            0, "row_id", pa.array([None, *range(1, ROWS)], pa.int64())
        ),
        lambda table: table.set_column(
            table.schema.get_field_index("title"),
            "title",
            pa.array([1] * ROWS, pa.int8()),
        ),
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
    table = pq.read_table(rows_path(root))
    number = table.schema.get_field_index(SOURCE_VALUES)
    values = pa.array([text] * ROWS, pa.string())
    commit_rows(root, table.set_column(number, SOURCE_VALUES, values))
    with pytest.raises(CorruptIndexError, match="source values"):
        set_columns(root, [1], {"title": ["sea"]})


@pytest.mark.parametrize(
    "first_shards", [[], [1], [0, 0], [0, 3, 2], [0, 5], [0, 1 << 40], [2]]
)
def test_files_that_do_not_follow_each_other_are_refused(root, first_shards):
    manifest = Manifest.load(root)
    entry = manifest.rows_files[0].file
    files = tuple(RowsFile(shard, entry) for shard in first_shards)
    replace(manifest, rows_files=files).write(Directory(root))
    with pytest.raises(CorruptIndexError, match=r"index\.json"):
        Manifest.load(root)
