"""Rows of captioned images in an index with holes and duplicates."""

import os
import unicodedata
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.captions.matching import (
    match_items,
    stored_captions,
)
from edje_index.captions.reading import CaptionedImage
from pipelines import delete_rows
from storage_formats import UsageError
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex, Manifest, RowsFile
from storage_formats.format.places import Directory
from tests.conftest import rows_path, write_arrays, write_random_index

SPEC = IndexSpec(11, 4, (2, 8), 4)


def items(*paths):
    return [CaptionedImage(path, ("a caption",), None) for path in paths]


@pytest.fixture
def index(tmp_path):
    """Rows /photos/0.jpg to /photos/10.jpg: 6 failed, 9 is a duplicate of 0."""
    write_random_index(
        tmp_path / "index", SPEC, failed=frozenset({6}), duplicates=frozenset({9})
    )
    return tmp_path / "index"


def match(root, wanted, *, allow_none=False):
    index = CommittedIndex.open(root)
    return match_items(index, wanted, allow_none=allow_none)[0].tolist()


def set_values(index, row, **changes):
    layout = Directory(index)
    path = rows_path(index)
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[row] |= changes
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    files = (RowsFile(0, FileEntry.of(layout, path)),)
    replace(Manifest.load(index), rows_files=files).write(layout)


def test_rows_and_what_is_missing(index):
    wanted = items(
        "/photos/10.jpg",
        "/photos/9.jpg",
        "/photos/6.jpg",
        "/elsewhere/1.jpg",
        "/photos/3.jpg",
        "/photos/3.jpg",
    )
    rows, missing = match_items(CommittedIndex.open(index), wanted)
    assert rows.tolist() == [10, 0, -1, -1, 3, 3]
    assert missing == {"not-in-index": 1, "truncated": 1}
    assert rows.dtype == np.int64


def test_deleted_rows_are_not_called_unknown(index):
    delete_rows(index, rows=[0, 3])
    wanted = items("/photos/3.jpg", "/photos/9.jpg", "/photos/5.jpg", "/photos/99.jpg")
    rows, missing = match_items(CommittedIndex.open(index), wanted)
    assert rows.tolist() == [-1, -1, 5, -1]
    assert missing == {"deleted": 2, "not-in-index": 1}


def test_nothing_in_common_is_an_error_that_shows_both_sides(index):
    with pytest.raises(
        UsageError,
        match=(
            r"none of the 2 captioned images.*/else/1\.jpg.*/photos/0\.jpg.*directory"
        ),
    ):
        match(index, items("/else/1.jpg", "/else/2.jpg"))
    assert match(index, items("/else/1.jpg"), allow_none=True) == [-1]
    assert match(index, [], allow_none=True) == []


def test_names_in_every_script_and_in_bytes(index):
    set_values(index, 2, uri="/photos/猫 é.jpg")
    set_values(index, 4, uri="/photos/%FF.jpg", uri_raw=b"/photos/\xff.jpg")
    set_values(index, 5, uri="/shards/a.tar!x/猫.jpg")
    strange = os.fsdecode(b"/photos/\xff.jpg")
    wanted = items("/photos/猫 é.jpg", strange, "/shards/a.tar!x/猫.jpg")
    assert match(index, wanted) == [2, 4, 5]


def test_folders_may_be_links(index, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    set_values(index, 7, uri=f"{tmp_path}/real/a.jpg")
    set_values(index, 8, uri=f"{tmp_path}/link/b.jpg")
    assert match(index, items(f"{tmp_path}/link/a.jpg", f"{tmp_path}/real/b.jpg")) == [
        7,
        8,
    ]


@pytest.mark.parametrize("stored", ["NFC", "NFD"])
@pytest.mark.parametrize("listed", ["NFC", "NFD"])
def test_both_unicode_forms_of_a_name(index, stored, listed):
    for row, folder in ((2, "/photos/"), (3, "/photos/z.zip!")):
        path = folder + "café Å が 한.jpg"
        set_values(index, row, uri=unicodedata.normalize(stored, path))
        assert match(index, items(unicodedata.normalize(listed, path))) == [row]


def test_captions_of_the_index_belong_to_their_rows_whatever_their_names(tmp_path):
    columns = {
        "uri": ["b", "a", "a"],
        "captions": [["0"], ["1"], ["2"]],
        "split": ["restval", "train", "val"],
    }
    blocks = np.ones((3, 2, 8), np.float32)
    write_arrays(tmp_path / "index", blocks, blocks[:, 0], columns)
    index = CommittedIndex.open(tmp_path / "index")
    stored = stored_captions(index)
    assert match_items(index, stored)[0].tolist() == [0, 1, 2]
    assert match_items(index, items("a", "b"))[0].tolist() == [1, 0]
    # as in a file of captions and in a training
    train = stored_captions(index, "train")
    assert [item.captions for item in train] == [("0",), ("1",)]
