"""Shards that workers encode while the sources of a build are still being listed.

The plan of a build needs the complete list. Until then, these shards are written to an index of their own,
`build/listed/`. When the plan is complete, `encode_shard` takes the rows from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from edje_index.images.inputs import InputRef
from edje_index.indexing.shard_task import ShardTask
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import Layout
from storage_formats.format.receipts import ShardReceipt, read_receipt
from storage_formats.format.rows import read_shard_rows, with_source_values
from storage_formats.writing.moved_shards import move_shard
from storage_formats.writing.shard_copy import data_files


def listed_shards(root: Path) -> set[int]:
    """Return the numbers of the shards in `build/listed/` of the index at `root` that have a receipt."""
    receipts = Layout(Layout(root).listed).receipt(0).parent.glob("*.json")
    return {int(path.stem) for path in receipts if path.stem.isdecimal()}


def listed_bytes(root: Path) -> int:
    """Return the total length in bytes of all files in `build/listed/` of the index at `root`."""
    return sum(path.stat().st_size for path in Layout(root).listed.rglob("*") if path.is_file())


def take_listed_shard(task: ShardTask, refs: Sequence[InputRef]) -> ShardReceipt | None:
    """Move a finished shard from `build/listed/` into the index. If it has other inputs or is damaged, remove it.

    Args:
        task: task that encodes the shard.
        refs: inputs of the shard, in row order.

    Returns:
        The receipt of the shard in the index; None if the shard is to be encoded.

    Raises:
        OSError: a file cannot be read, moved or written.
    """
    listed = Layout(task.layout.listed)
    if not listed.receipt(task.shard).exists():
        return None
    rows_file = listed.rows_file(task.shard)
    files = {*data_files(listed, task.spec, task.shard), rows_file}
    receipt = read_receipt(listed, task.shard, task.listed_fingerprint(refs))
    if receipt is not None and {listed.root / file.path for file in receipt.files} == files:
        entry = next(file for file in receipt.files if listed.root / file.path == rows_file)
        with contextlib.suppress(CorruptIndexError):  # then the shard is encoded again
            rows = read_shard_rows(listed, task.shard, committed=entry)
            rows = with_source_values(rows, task.columns, [ref.metadata for ref in refs])
            return move_shard(listed, task.layout, receipt, plan=task.plan, rows=rows)
    for path in (listed.receipt(task.shard), *files):  # first, because the disk may be full
        path.unlink(missing_ok=True)
    return None
