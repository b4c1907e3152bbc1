"""Embeddings of single rows equal those of whole shards and of zarr-python."""

from __future__ import annotations

import os

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.storage_formats.reading_cases import flip

SPEC = IndexSpec(150, 64, (2, 8), 12)


@given(rows=st.lists(st.integers(0, SPEC.rows - 1), max_size=90))
def test_embeddings_of_any_rows_in_any_order(sound, rows):
    """Few rows of a shard are read one by one, many with the whole shard. The last
    shard is shorter.
    """
    found = read_embeddings(
        CommittedIndex.open(sound[0]), np.array(rows, dtype=np.int64)
    )
    stored = zarr.open_array(sound[0] / "embeddings", mode="r")[:]
    np.testing.assert_array_equal(found, stored[rows])
    assert (found.dtype, found.shape) == (np.float32, (len(rows), 12))


@pytest.mark.parametrize(
    "rows", [[70], list(range(64, 128))], ids=["one row", "whole shard"]
)
@pytest.mark.parametrize("damage", ["exchanged", "one byte"])
def test_a_file_other_than_the_committed_one_is_noticed(index, rows, damage):
    root = index[0]
    opened = CommittedIndex.open(root)
    read_embeddings(opened, range(SPEC.rows))
    path = Layout(root).embedding_shard(1)
    if damage == "exchanged":
        path.write_bytes(Layout(root).embedding_shard(0).read_bytes())
    else:
        flip(path, 400)
    with pytest.raises(CorruptIndexError, match=path.name) as caught:
        read_embeddings(opened, rows)
    assert caught.value.row_ids == tuple(range(64, 128))


def test_a_copy_compares_files_whose_times_have_not_changed(index):
    opened = CommittedIndex.open(index[0])
    read_embeddings(opened, [70])
    path = Layout(index[0]).embedding_shard(1)
    times = path.stat()
    flip(path, 400)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    read_embeddings(opened, [70])
    with pytest.raises(CorruptIndexError, match=path.name):
        read_embeddings(opened, [70], compares_all=True)
