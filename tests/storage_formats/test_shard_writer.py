from __future__ import annotations

import json

import numpy as np
import pytest

from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.places import Directory
from storage_formats.format.receipts import ShardReceipt, read_receipts
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.shard_writer import ShardWriter
from tests.conftest import all_files, finish_index, random_blocks

SPEC = IndexSpec(11, 8, (4, 16), 6)


def table_of(spec: IndexSpec, shard: int, status: str = "indexed"):
    return rows_table(
        [RowEntry(row, f"/{row}.jpg", status=status) for row in spec.shard_rows(shard)]
    )


def commit_shard(root, spec=SPEC, shard=0, seed=0) -> ShardReceipt:
    count = len(spec.shard_rows(shard))
    blocks = random_blocks(np.random.default_rng(seed), count, spec)
    with ShardWriter(Directory(root), spec, shard) as writer:
        writer.put(
            np.arange(count), blocks, np.ones((count, spec.embed_dim), np.float32)
        )
        return writer.commit(table_of(spec, shard), "plan", {"write": 1.5})


def test_a_receipt_is_invalid_for_another_plan_or_after_loss_of_files(tmp_path):
    layout = Directory(tmp_path)
    assert read_receipts(layout, [0], "plan").get(0) is None
    commit_shard(tmp_path)
    assert read_receipts(layout, [0], "other").get(0) is None
    for path in (layout.token_shard("bf16", 0), layout.staged_rows(0)):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert read_receipts(layout, [0], "plan").get(0) is None
        path.write_bytes(data)
        assert read_receipts(layout, [0], "plan").get(0) is not None
    layout.receipt(0).write_text(json.dumps({"shard": 0}))
    assert read_receipts(layout, [0], "plan").get(0) is None


def test_an_attempt_that_was_thought_dead_cannot_commit(tmp_path):
    late = ShardWriter(Directory(tmp_path), SPEC, 0)
    other = ShardWriter(Directory(tmp_path), SPEC, 1)
    late.put(
        np.array([0]),
        random_blocks(np.random.default_rng(9), 1, SPEC),
        np.ones((1, 6), np.float32),
    )
    commit_shard(tmp_path, seed=1)
    committed = all_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        late.commit(table_of(SPEC, 0), "plan", {})
    assert committed.items() <= all_files(tmp_path).items()
    other.put(
        np.array([0]),
        random_blocks(np.random.default_rng(0), 1, SPEC),
        np.ones((1, 6), np.float32),
    )
    # the private files of other shards stay
    other.commit(table_of(SPEC, 1), "plan", {})


def test_finishing_needs_every_shard(tmp_path):
    receipt = commit_shard(tmp_path)
    with pytest.raises(
        CorruptIndexError,
        match="2 shards need one receipt each, but there are receipts for 1",
    ):
        finish_index(tmp_path, SPEC, [receipt])
    assert not Directory(tmp_path).manifest.exists()
