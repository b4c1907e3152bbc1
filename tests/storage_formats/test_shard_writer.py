from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_formats.change import begin_index, clear_staging
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.checksum import crc32c, crc32c_file
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes
from storage_formats.format.receipts import ShardReceipt, read_receipt
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.publish import Provenance, finish_index
from storage_formats.writing.shard_writer import ShardWriter
from storage_formats.writing.staging import StagedFiles
from tests.conftest import random_blocks, write_random_index

SPEC = IndexSpec(rows=11, shard_size=8, block_shape=(4, 16), embed_dim=6)


def table_of(spec: IndexSpec, shard: int, status: str = "indexed"):
    return rows_table([RowEntry(row, f"/{row}.jpg", status=status) for row in spec.shard_rows(shard)])


def commit_shard(root, spec=SPEC, shard=0, seed=0) -> ShardReceipt:
    count = len(spec.shard_rows(shard))
    blocks = random_blocks(np.random.default_rng(seed), count, spec)
    with ShardWriter(root, spec, shard) as writer:
        writer.put(np.arange(count), blocks, np.ones((count, spec.embed_dim), np.float32))
        return writer.commit(table_of(spec, shard), "plan", {"write": 1.5})


@given(st.integers(1, 2048), st.integers(1, 2048), st.integers(1, 60_000))
def test_shard_files_are_whole_pages_with_room_for_the_index(rows, shard_size, record_bytes):
    offset, length = padded_shard_bytes(rows, shard_size, record_bytes)
    assert length % 4096 == 0
    assert offset + shard_size * 16 + 4 == length
    assert 0 <= offset - rows * record_bytes < 4096


def test_receipt_names_every_file_with_its_length_and_checksum(tmp_path):
    begin_index(tmp_path, SPEC)
    receipt = commit_shard(tmp_path)
    found = {file.path: (file.bytes, file.crc32c) for file in receipt.files}
    assert set(found) == {
        "tokens/bf16/c.0.0.0",
        "checksums/bf16/00000000.crc32c",
        "embeddings/c.0.0",
        "rows/00000000.parquet",
    }
    assert found == {path: crc32c_file(tmp_path / path) for path in found}
    assert read_receipt(Layout(tmp_path), 0, "plan") == receipt
    records = (tmp_path / "tokens/bf16/c.0.0.0").read_bytes()
    sums = np.fromfile(tmp_path / "checksums/bf16/00000000.crc32c", "<u4")
    assert [crc32c(records[at * 128 : (at + 1) * 128]) for at in range(8)] == sums.tolist()


def test_a_receipt_is_invalid_for_another_plan_or_after_loss_of_files(tmp_path):
    begin_index(tmp_path, SPEC)
    layout = Layout(tmp_path)
    assert read_receipt(layout, 0, "plan") is None
    commit_shard(tmp_path)
    assert read_receipt(layout, 0, "other") is None
    for path in (layout.token_shard("bf16", 0), layout.rows_file(0)):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert read_receipt(layout, 0, "plan") is None
        path.write_bytes(data)
        assert read_receipt(layout, 0, "plan") is not None
    layout.receipt(0).write_text(json.dumps({"shard": 0}))
    assert read_receipt(layout, 0, "plan") is None


def test_abandoned_attempt_leaves_nothing_behind(tmp_path):
    begin_index(tmp_path, SPEC)
    with ShardWriter(tmp_path, SPEC, 0) as writer:
        writer.put(np.array([0]), random_blocks(np.random.default_rng(0), 1, SPEC), np.ones((1, 6), np.float32))
    layout = Layout(tmp_path)
    assert list(layout.staging.iterdir()) == []
    assert not layout.token_shard("bf16", 0).exists()


def test_an_attempt_that_was_thought_dead_cannot_commit(tmp_path):
    begin_index(tmp_path, SPEC)
    late, other = ShardWriter(tmp_path, SPEC, 0), ShardWriter(tmp_path, SPEC, 1)
    late.put(np.array([0]), random_blocks(np.random.default_rng(9), 1, SPEC), np.ones((1, 6), np.float32))
    commit_shard(tmp_path, seed=1)
    committed = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FileNotFoundError):
        late.commit(table_of(SPEC, 0), "plan", {})
    assert {path: path.read_bytes() for path in committed} == committed
    other.put(np.array([0]), random_blocks(np.random.default_rng(0), 1, SPEC), np.ones((1, 6), np.float32))
    other.commit(table_of(SPEC, 1), "plan", {})  # the private files of other shards stay


def test_an_attempt_that_was_thought_dead_does_not_replace_the_receipt(tmp_path):
    begin_index(tmp_path, SPEC)
    layout = Layout(tmp_path)
    late = StagedFiles(layout, 0)
    late.add_bytes("rows", layout.rows_file(0), b"late")
    files = late.commit()
    receipt = commit_shard(tmp_path)
    with pytest.raises(FileNotFoundError):
        late.commit_receipt(replace(receipt, files=files))
    assert read_receipt(layout, 0, "plan") == receipt


def test_clearing_removes_private_files_only(tmp_path):
    begin_index(tmp_path, SPEC)
    commit_shard(tmp_path)
    ShardWriter(tmp_path, SPEC, 0)  # a crashed attempt: never committed, never aborted
    assert len(list(Layout(tmp_path).staging.iterdir())) == 1
    whole = {
        path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(Layout(tmp_path).staging)
    }
    clear_staging(tmp_path)
    assert list(Layout(tmp_path).staging.iterdir()) == []
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == whole


@pytest.mark.parametrize("positions", [[3, 2], [1, 1], [8], [0, 99]])
def test_positions_must_ascend_within_the_shard(tmp_path, positions):
    begin_index(tmp_path, SPEC)
    blocks = random_blocks(np.random.default_rng(0), len(positions), SPEC)
    with ShardWriter(tmp_path, SPEC, 0) as writer, pytest.raises(UsageError, match="must ascend"):
        writer.put(np.array(positions), blocks, np.ones((len(positions), 6), np.float32))


def test_positions_must_ascend_between_calls(tmp_path):
    begin_index(tmp_path, SPEC)
    block = random_blocks(np.random.default_rng(0), 1, SPEC)
    with ShardWriter(tmp_path, SPEC, 0) as writer:
        writer.put(np.array([4]), block, np.ones((1, 6), np.float32))
        with pytest.raises(UsageError, match="must ascend"):
            writer.put(np.array([4]), block, np.ones((1, 6), np.float32))


def test_shapes_must_agree(tmp_path):
    begin_index(tmp_path, SPEC)
    with ShardWriter(tmp_path, SPEC, 0) as writer:
        with pytest.raises(UsageError, match="embeddings"):
            writer.put(np.array([0]), np.zeros((1, 4, 16), ml_dtypes.bfloat16), np.ones((1, 7), np.float32))
        with pytest.raises(UsageError, match="has 8 rows, but the rows table has 3;"):
            writer.commit(table_of(SPEC, 1), "plan", {})


def test_finishing_needs_every_shard(tmp_path):
    begin_index(tmp_path, SPEC)
    receipt = commit_shard(tmp_path)
    provenance = Provenance({"fingerprint": "f"}, {}, "plan")
    with pytest.raises(CorruptIndexError, match="2 shards need one receipt each, but there are receipts for 1"):
        finish_index(tmp_path, SPEC, [receipt], provenance, {})
    assert not Layout(tmp_path).manifest.exists()


def test_same_blocks_give_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_random_index(tmp_path / name, SPEC, failed=frozenset({2}))
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 13
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
