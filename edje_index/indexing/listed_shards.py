"""Shards that workers encode while the sources of a build are still being listed.

The plan of a build needs the complete list. Until then, these shards are written to an index of their own,
`build/listed/`. When the plan is complete, `encode_shard` takes the rows from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from edje_index.images.input_lists import read_shard_inputs
from edje_index.images.inputs import InputRef
from edje_index.indexing.shard_task import ShardTask, listed_fingerprint
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import ShardReceipt, read_receipt
from storage_formats.format.rows import read_shard_rows, with_source_values
from storage_formats.writing.moved_shards import move_shard
from storage_formats.writing.pieces import ShardPieces, rows_in_pieces
from storage_formats.writing.shard_copy import data_files


def listed_shards(root: Path) -> set[int]:
    """Return the numbers of the shards in `build/listed/` of the index at `root` that have a receipt."""
    receipts = Layout(Layout(root).listed).receipt(0).parent.glob("*.json")
    return {int(path.stem) for path in receipts if path.stem.isdecimal()}


def listed_bytes(root: Path) -> int:
    """Return the total length in bytes of all files in `build/listed/` of the index at `root`."""
    return sum(path.stat().st_size for path in Layout(root).listed.rglob("*") if path.is_file())


def has_listed_rows(root: Path) -> bool:
    """Return True if `build/listed/` of the index at `root` has finished shards, or pieces of unfinished shards."""
    return bool(listed_shards(root) or rows_in_pieces(Layout(Layout(root).listed)))


def stored_rows(root: Path, spec: IndexSpec) -> dict[int, int]:
    """Return the number of stored rows by shard, of shards in `build/listed/` and of unfinished shards of an index.

    Args:
        root: directory of the index. `remove_other_rows` must have been called.
        spec: shape of the index.
    """
    layout = Layout(root)
    listed = Layout(layout.listed)
    rows = rows_in_pieces(listed, layout)
    moved = (shard for shard in listed_shards(root) if all(path.exists() for path in _files(listed, spec, shard)))
    return rows | {shard: len(spec.shard_rows(shard)) for shard in moved}


def remove_other_rows(root: Path, spec: IndexSpec, settings: str) -> None:
    """Remove all files from `build/listed/` that a build cannot use. No worker may write there.

    Args:
        root: directory of the index. `build/inputs/` is complete.
        spec: shape of the index.
        settings: see `ShardTask`.

    Raises:
        CorruptIndexError: an input list is damaged.
        OSError: a file cannot be read or removed.
    """
    listed = Layout(Layout(root).listed)
    used: set[Path] = set()
    for shard in {*listed_shards(root), *rows_in_pieces(listed)}.intersection(range(spec.shards)):
        plan = listed_fingerprint(settings, shard, read_shard_inputs(Layout(root), spec, shard))
        if _read_receipt(listed, spec, shard, plan) is not None:
            used.update([listed.receipt(shard), *_files(listed, spec, shard)])
        else:
            used.update(ShardPieces(listed, spec, shard, plan).files())
    for path in listed.root.rglob("*"):
        if path not in used and (path.is_file() or path.is_symlink()):
            path.unlink()


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
    moved, receipt = None, _read_receipt(listed, task.spec, task.shard, task.listed_fingerprint(refs))
    if receipt is not None:
        rows_path = listed.relative(listed.rows_file(task.shard))
        entry = next(file for file in receipt.files if file.path == rows_path)
        with contextlib.suppress(CorruptIndexError):  # then the shard is encoded again
            rows = read_shard_rows(listed, task.shard, committed=entry)
            rows = with_source_values(rows, task.columns, [ref.metadata for ref in refs])
            moved = move_shard(listed, task.layout, receipt, plan=task.plan, rows=rows)
    # Before the shard is encoded again, because the disk may be full.
    for path in (listed.receipt(task.shard), *_files(listed, task.spec, task.shard)):
        path.unlink(missing_ok=True)
    return moved


def _read_receipt(listed: Layout, spec: IndexSpec, shard: int, plan: str) -> ShardReceipt | None:
    """Return the receipt of a shard in `build/listed/`; None if it is not valid, or names other files."""
    receipt = read_receipt(listed, shard, plan)
    named = receipt and {listed.root / file.path for file in receipt.files}
    return receipt if named == {*_files(listed, spec, shard)} else None


def _files(listed: Layout, spec: IndexSpec, shard: int) -> Collection[Path]:
    return [*data_files(listed, spec, shard), listed.rows_file(shard)]
