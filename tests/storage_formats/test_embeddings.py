"""Embeddings of single rows equal those of whole shards and of zarr-python."""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from storage_formats.errors import CorruptIndexError, RowIdError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=150, shard_size=64, block_shape=(2, 8), embed_dim=12)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("embeddings") / "index"
    write_random_index(root, SPEC)
    return root


@given(rows=st.lists(st.integers(0, SPEC.rows - 1), max_size=90))
def test_embeddings_of_any_rows_in_any_order(index, rows):
    """Few rows of a shard are read one by one, many with the whole shard. The last shard is shorter."""
    found = read_embeddings(index, SPEC, np.array(rows, dtype=np.int64))
    stored = zarr.open_array(index / "embeddings", mode="r")[:]
    np.testing.assert_array_equal(found, stored[rows])
    assert (found.dtype, found.shape) == (np.float32, (len(rows), 12))


@pytest.mark.parametrize("rows", [[0, 150], [-1], [10**9]])
def test_row_ids_out_of_range_are_refused(index, rows):
    with pytest.raises(RowIdError, match="the index has the row ids 0 to 149"):
        read_embeddings(index, SPEC, np.array(rows))


@pytest.mark.parametrize("rows", [[70], list(range(64, 128))])
def test_a_short_or_missing_file_is_named(tmp_path, rows):
    root = tmp_path / "index"
    write_random_index(root, SPEC)
    path = Layout(root).embedding_shard(1)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CorruptIndexError, match=path.name):
        read_embeddings(root, SPEC, np.array(rows))
    path.unlink()
    with pytest.raises(CorruptIndexError, match="cannot read the embeddings of shard 1"):
        read_embeddings(root, SPEC, np.array(rows))
