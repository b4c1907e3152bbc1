"""Stock Zarr readers open the arrays of every precision and return the bytes of
every block.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tensorstore as ts
import zarr

from storage_formats import TokenStore, codec, precisions
from storage_formats.codecs import fill_record
from storage_formats.format.layout import IndexSpec
from storage_formats.format.offset import offset_block, write_offset
from storage_formats.format.places import Directory
from tests.conftest import REPO, same_bits, write_random_index
from tests.storage_formats.reading_cases import flip

SPEC = IndexSpec(21, 8, (4, 32), 6, precisions=precisions())
FULL = IndexSpec(3, 1024, (64, 384), 384)
HOLES = [0, 9, 10, 20]


def read_zarr(path):
    return np.asarray(zarr.open_array(str(path), mode="r")[...])


def read_tensorstore(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(ts.open(spec, read=True).result().read().result())


READERS = pytest.mark.parametrize("read", [read_zarr, read_tensorstore])


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("index")
    return root, write_random_index(
        root, SPEC, failed=frozenset({0, 9, 20}), duplicates=frozenset({10})
    )


@READERS
@pytest.mark.parametrize("name", precisions())
def test_stock_readers_and_the_store_return_every_block(index, name, read):
    root, blocks = index
    entry = codec(name, SPEC.block_shape)
    values = np.ascontiguousarray(read(root / "tokens" / name))
    assert values.shape == (SPEC.rows, *entry.record_shape)
    records = values.view(np.uint8).reshape(SPEC.rows, -1)
    assert (records[HOLES] == fill_record(entry)).all()
    expected = entry.decode(entry.encode(blocks))
    assert same_bits(entry.decode(records), expected)
    with TokenStore.open(root, name) as store:
        rows = [20, 3, 0, 3, 11, 9]
        fetched = store.fetch(rows)
        assert same_bits(fetched, expected[rows])
        assert store.holes(fetched).tolist() == [row in HOLES for row in rows]


@READERS
def test_every_embedding_reads_back(index, read):
    embeddings = read(index[0] / "embeddings")
    assert embeddings.shape == (SPEC.rows, SPEC.embed_dim)
    assert np.flatnonzero(np.isnan(embeddings).all(axis=1)).tolist() == HOLES
    lengths = np.linalg.norm(np.delete(embeddings, HOLES, axis=0), axis=1)
    assert np.allclose(lengths, 1, atol=1e-6)


@READERS
def test_missing_and_damaged_shards_are_noticed(index, tmp_path, read):
    root = shutil.copytree(index[0], tmp_path / "index")
    Directory(root).token_shard("bf16", 1).unlink()
    expected = index[1].copy()
    expected[8:16] = np.nan
    assert same_bits(read(root / "tokens/bf16"), expected)
    path = Directory(root).token_shard("bf16", 0)
    flip(path, path.stat().st_size - 20)
    with pytest.raises(ValueError, match=r"(?i)checksum|digest"):
        read(root / "tokens/bf16")


def test_group_lists_its_arrays(index):
    group = zarr.open_group(str(index[0] / "tokens"), mode="r")
    assert {name for name, _ in group.arrays()} == set(precisions())


def test_records_start_at_pages_and_the_file_is_whole_pages(tmp_path):
    expected = write_random_index(tmp_path, FULL)
    mapped = np.memmap(Directory(tmp_path).token_shard("bf16", 0), mode="r")
    assert len(mapped) % 4096 == 0
    # 12 pages each
    records = mapped[: FULL.rows * 12 * 4096].reshape(FULL.rows, -1)
    assert (records == expected.reshape(FULL.rows, -1).view(np.uint8)).all()


@pytest.mark.parametrize("name", [each for each in precisions() if each != "bf16"])
@pytest.mark.parametrize("has_offset", [False, True])
def test_the_script_of_the_docs_decodes_every_precision(tmp_path, name, has_offset):
    page = (REPO / "docs/quantize.md").read_text()
    script = re.search(r"```python\n(import ml_dtypes.*?)```", page, re.DOTALL)[1]
    names: dict = {}
    exec(script, names)
    offset = np.random.default_rng(1).standard_normal((4, 32), dtype=np.float32)
    spec = replace(SPEC, precisions=(name,))
    if has_offset and (block := offset_block(offset, [name])):
        spec = replace(spec, offset=block)
        write_offset(Directory(tmp_path), offset)
    write_random_index(tmp_path, spec, failed=frozenset({3}))
    blocks = names["read_blocks"](tmp_path, name)
    kept = [row for row in range(SPEC.rows) if row != 3]
    with TokenStore.open(tmp_path, name) as store:
        assert same_bits(blocks[kept], store.fetch(kept))
        assert np.flatnonzero(store.holes(blocks)).tolist() == [3]
