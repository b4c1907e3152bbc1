"""Rows of captioned images in an index with holes and duplicates."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.captions.matching import (
    NAME_COLUMNS,
    MatchedRows,
    match_items,
    name_table,
    stored_captions,
)
from edje_index.captions.reading import CaptionedImage
from pipelines import delete_rows
from storage_formats import UsageError
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex, Manifest, RowsFile
from storage_formats.format.places import Directory
from storage_formats.format.rows import read_all_rows, write_rows
from tests.conftest import rows_path, write_arrays, write_random_index

SPEC = IndexSpec(rows=11, shard_size=4, block_shape=(2, 8), embed_dim=4)


def items(*paths: str) -> list[CaptionedImage]:
    return [CaptionedImage(path, ("a caption",), None) for path in paths]


@pytest.fixture
def index(tmp_path):
    """Rows /photos/0.jpg to /photos/10.jpg: 6 failed, 9 is a duplicate of 0."""
    write_random_index(
        tmp_path / "index", SPEC, failed=frozenset({6}), duplicates=frozenset({9})
    )
    return tmp_path / "index"


def match(
    root: Path, wanted: list[CaptionedImage], *, allow_none: bool = False
) -> MatchedRows:
    table = read_all_rows(CommittedIndex.open(root), NAME_COLUMNS)
    return match_items(root, table, wanted, allow_none=allow_none)


def set_values(index: Path, row: int, **changes: object) -> None:
    layout = Directory(index)
    manifest = Manifest.load(index)
    path = rows_path(index)
    table = pq.read_table(path)
    for name, value in changes.items():
        column = table.column_names.index(name)
        values = table[name].to_pylist()
        values[row] = value
        table = table.set_column(
            column, name, pa.array(values, table.schema.field(name).type)
        )
    write_rows(path, table)
    files = (RowsFile(0, FileEntry.of(layout, path)),)
    replace(manifest, rows_files=files).write(layout)


def test_rows_and_what_is_missing(index):
    wanted = items(
        "/photos/10.jpg",
        "/photos/9.jpg",
        "/photos/6.jpg",
        "/elsewhere/1.jpg",
        "/photos/3.jpg",
        "/photos/3.jpg",
    )
    matched = match(index, wanted)
    assert matched.rows.tolist() == [10, 0, -1, -1, 3, 3]
    assert matched.reasons == (None, None, "truncated", "not-in-index", None, None)
    assert matched.missing() == {"not-in-index": 1, "truncated": 1}
    assert match(index, wanted).rows.dtype == np.int64


def test_deleted_rows_are_not_called_unknown(index):
    delete_rows(index, rows=[0, 3])
    wanted = items("/photos/3.jpg", "/photos/9.jpg", "/photos/5.jpg", "/photos/99.jpg")
    matched = match_items(index, name_table(CommittedIndex.open(index)), wanted)
    assert matched.rows.tolist() == [-1, -1, 5, -1]
    assert matched.reasons == ("deleted", "deleted", None, "not-in-index")


def test_nothing_in_common_is_an_error_that_shows_both_sides(index):
    with pytest.raises(
        UsageError,
        match=(
            r"none of the 2 captioned images.*/else/1\.jpg.*/photos/0\.jpg.*directory"
        ),
    ):
        match(index, items("/else/1.jpg", "/else/2.jpg"))
    assert match(index, items("/else/1.jpg"), allow_none=True).rows.tolist() == [-1]
    assert match(index, [], allow_none=True).rows.tolist() == []


def test_names_in_every_script_and_in_bytes(index):
    set_values(index, 2, uri="/photos/猫 é.jpg")
    set_values(index, 4, uri="/photos/%FF.jpg", uri_raw=b"/photos/\xff.jpg")
    set_values(index, 5, uri="/shards/a.tar!x/猫.jpg")
    strange = os.fsdecode(b"/photos/\xff.jpg")
    wanted = items(
        "/photos/猫 é.jpg", strange, "/shards/a.tar!x/猫.jpg", "/photos/%FF.jpg"
    )
    assert match(index, wanted).rows.tolist() == [2, 4, 5, -1]


def test_the_first_of_two_rows_with_one_name(index):
    set_values(index, 8, uri="/photos/1.jpg")
    assert match(index, items("/photos/1.jpg")).rows.tolist() == [1]


def test_folders_may_be_links(index, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    set_values(index, 7, uri=f"{tmp_path}/real/a.jpg")
    set_values(index, 8, uri=f"{tmp_path}/link/b.jpg")
    assert match(
        index, items(f"{tmp_path}/link/a.jpg", f"{tmp_path}/real/b.jpg")
    ).rows.tolist() == [7, 8]


def test_captions_of_the_index_belong_to_their_rows_whatever_their_names(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"uri": ["b", "a", "a"], "captions": [["0"], ["1"], ["2"]]}
    write_arrays(
        tmp_path / "index",
        rng.standard_normal((3, 2, 8), np.float32),
        rng.standard_normal((3, 4), np.float32),
        columns,
    )
    index = CommittedIndex.open(tmp_path / "index")
    table = read_all_rows(index, NAME_COLUMNS)
    stored = stored_captions(index)
    assert match_items(index.root, table, stored).rows.tolist() == [0, 1, 2]
    assert match_items(index.root, table, items("a", "b")).rows.tolist() == [1, 0]
