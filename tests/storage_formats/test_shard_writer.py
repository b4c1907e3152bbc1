from __future__ import annotations

import numpy as np
import pytest

from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.places import Directory
from storage_formats.format.receipts import read_receipts
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.shard_writer import ShardWriter
from tests.conftest import all_files, finish_index, random_blocks

SPEC = IndexSpec(11, 8, (4, 16), 6)


def table_of(shard):
    return rows_table([RowEntry(row, f"/{row}.jpg") for row in SPEC.shard_rows(shard)])


def put(writer, count, seed=0):
    blocks = random_blocks(np.random.default_rng(seed), count, SPEC)
    embeddings = np.ones((count, SPEC.embed_dim), np.float32)
    writer.put(np.arange(count), blocks, embeddings)


def commit_shard(root, seed=0):
    with ShardWriter(Directory(root), SPEC, 0) as writer:
        put(writer, 8, seed)
        return writer.commit(table_of(0), "plan", {"write": 1.5})


def test_a_receipt_is_invalid_for_another_plan_or_after_loss_of_files(tmp_path):
    layout = Directory(tmp_path)

    def is_valid(plan="plan"):
        return 0 in read_receipts(layout, [0], plan)

    assert not is_valid()
    commit_shard(tmp_path)
    assert not is_valid("other")
    for path in (layout.token_shard("bf16", 0), layout.staged_rows(0)):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert not is_valid()
        path.write_bytes(data)
        assert is_valid()
    layout.receipt(0).write_text('{"shard": 0}')
    assert not is_valid()


def test_an_attempt_that_was_thought_dead_cannot_commit(tmp_path):
    late = ShardWriter(Directory(tmp_path), SPEC, 0)
    other = ShardWriter(Directory(tmp_path), SPEC, 1)
    put(late, 1, seed=9)
    commit_shard(tmp_path, seed=1)
    committed = all_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        late.commit(table_of(0), "plan", {})
    assert committed.items() <= all_files(tmp_path).items()
    put(other, 1)
    # the private files of other shards stay
    other.commit(table_of(1), "plan", {})


def test_finishing_needs_every_shard(tmp_path):
    receipt = commit_shard(tmp_path)
    with pytest.raises(CorruptIndexError, match=r"2 shards .* receipts for 1"):
        finish_index(tmp_path, SPEC, [receipt])
    assert not Directory(tmp_path).manifest.exists()
