"""Stock Zarr readers open the arrays and return the bytes of every block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr

from storage_formats.format.layout import IndexSpec, Layout
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(4, 16), embed_dim=6)
FULL = IndexSpec(rows=3, shard_size=1024, block_shape=(64, 384), embed_dim=384)
FAILED, DUPLICATES = frozenset({0, 9, 20}), frozenset({10})


def read_zarr(path: Path) -> np.ndarray:
    return np.asarray(zarr.open_array(str(path), mode="r")[...])


def read_tensorstore(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(ts.open(spec, read=True).result().read().result())


READERS = pytest.mark.parametrize("read", [read_zarr, read_tensorstore])


@READERS
@pytest.mark.parametrize("spec", [SPEC, FULL], ids=["small", "64x384"])
def test_every_block_and_embedding_reads_back(tmp_path, read, spec):
    failed = frozenset(row for row in FAILED if row < spec.rows)
    duplicates = frozenset(row for row in DUPLICATES if row < spec.rows)
    expected = write_random_index(tmp_path, spec, failed=failed, duplicates=duplicates)
    assert same_bits(read(tmp_path / "tokens/bf16"), expected)
    embeddings = read(tmp_path / "embeddings")
    assert embeddings.shape == (spec.rows, spec.embed_dim)
    holes = np.isnan(embeddings).all(axis=1)
    assert set(np.flatnonzero(holes)) == failed | duplicates
    assert np.allclose(np.linalg.norm(embeddings[~holes], axis=1), 1, atol=1e-6)


@READERS
def test_missing_shard_reads_as_nan(tmp_path, read):
    expected = write_random_index(tmp_path, SPEC)
    Layout(tmp_path).token_shard("bf16", 1).unlink()
    expected[8:16] = np.nan
    assert same_bits(read(tmp_path / "tokens/bf16"), expected)


@READERS
def test_damaged_shard_index_is_refused(tmp_path, read):
    write_random_index(tmp_path, SPEC)
    path = Layout(tmp_path).token_shard("bf16", 0)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"(?i)checksum|digest"):
        read(tmp_path / "tokens/bf16")


def test_group_lists_its_arrays(tmp_path):
    write_random_index(tmp_path, SPEC)
    group = zarr.open_group(str(tmp_path / "tokens"), mode="r")
    assert [(name, array.shape) for name, array in group.arrays()] == [("bf16", (21, 4, 16))]


def test_records_start_at_pages_and_the_file_is_whole_pages(tmp_path):
    expected = write_random_index(tmp_path, FULL)
    mapped = np.memmap(Layout(tmp_path).token_shard("bf16", 0), dtype=np.uint16, mode="r")
    assert mapped.nbytes % 4096 == 0
    for row in range(FULL.rows):
        assert (row * 49152) % 4096 == 0
        block = mapped[row * 24576 : (row + 1) * 24576].reshape(64, 384)
        assert (block == expected[row].view(np.uint16)).all()
