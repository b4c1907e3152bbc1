"""Moves a finished shard from one index to another on the same file system."""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from storage_formats.format.layout import Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import write_rows
from storage_formats.writing.staging import StagedFiles


def move_shard(source: Layout, target: Layout, receipt: ShardReceipt, *, plan: str, rows: pa.Table) -> ShardReceipt:
    """Move the shard of `receipt` to the same shard number of another index, and commit it there.

    If this is interrupted, the shard is committed in `target`, in `source`, or in neither.

    Args:
        source: layout of the index with the shard.
        target: layout of the index that gets the shard.
        receipt: receipt of the shard in `source`.
        plan: fingerprint of the plan of `target`.
        rows: rows table of the shard in `target`.

    Returns:
        The receipt in `target`.

    Raises:
        OSError: a file is missing or cannot be moved or written.
    """
    rows_path = source.relative(source.rows_file(receipt.shard))
    staged = StagedFiles(target, receipt.shard)
    try:
        for number, file in enumerate(file for file in receipt.files if file.path != rows_path):
            (source.root / file.path).replace(staged.path(str(number)))
            staged.add(str(number), target.root / file.path, file.bytes, file.crc32c)
        write_rows(staged.path("rows"), rows)
        staged.add("rows", target.rows_file(receipt.shard))
        moved = dataclasses.replace(receipt, plan=plan, files=staged.commit())
        staged.commit_receipt(moved)
    finally:
        staged.remove()
    return moved
