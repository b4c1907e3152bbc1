"""Every precision in the writer, the store, verification and stock readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr

from storage_formats import TokenStore, codec, precisions, verify_index
from storage_formats.codecs import fill_record
from storage_formats.format.layout import IndexSpec
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(4, 32), embed_dim=6, precisions=precisions())
HOLES = [0, 9, 20]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("index")
    blocks = write_random_index(root, SPEC, failed=frozenset(HOLES))
    return root, blocks


def test_index_is_sound(index):
    assert verify_index(index[0]) == []


@pytest.mark.parametrize("name", precisions())
def test_the_store_returns_decoded_blocks_and_holes(index, name):
    root, blocks = index
    entry = codec(name, SPEC.block_shape)
    with TokenStore.open(root, name) as store:
        rows = [20, 3, 0, 3, 11, 9]
        fetched = store.fetch(rows)
        assert same_bits(fetched, entry.decode(entry.encode(blocks[rows])))
        assert store.holes(fetched).tolist() == [row in HOLES for row in rows]


def read_zarr(path: Path) -> np.ndarray:
    return np.asarray(zarr.open_array(str(path), mode="r")[...])


def read_tensorstore(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(ts.open(spec, read=True).result().read().result())


@pytest.mark.parametrize("read", [read_zarr, read_tensorstore])
@pytest.mark.parametrize("name", precisions())
def test_stock_readers_return_the_records(index, name, read):
    root, blocks = index
    entry = codec(name, SPEC.block_shape)
    values = np.ascontiguousarray(read(root / "tokens" / name))
    assert values.shape == (SPEC.rows, *entry.record_shape)
    records = values.view(np.uint8).reshape(SPEC.rows, -1)
    assert (records[HOLES] == fill_record(entry)).all()
    assert same_bits(entry.decode(records), entry.decode(entry.encode(blocks)))
