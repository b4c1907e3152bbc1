"""Copying of whole shards into a new index, for merges and splits (SPEC.md section 12.2). No block is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_formats.codecs import codec
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import EXTENDED_VERSION, SNAPSHOT_VERSION, IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest, Snapshot, created_by
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import read_shard_rows, write_rows
from storage_formats.format.shard_table import FileEntry, read_shard_tables, write_shard_table
from storage_formats.format.source_columns import SourceColumn
from storage_formats.format.tombstones import Tombstones
from storage_formats.writing.file_copy import copy_file
from storage_formats.writing.publish import check_receipts, total_counts
from storage_formats.writing.row_copy import receipt_of_rows
from storage_formats.writing.snapshots import write_tombstones
from storage_formats.writing.staging import StagedFiles


class CommittedShards:
    """The shards of an index, with the file entries in its shard tables.

    Raises:
        CorruptIndexError: a shard table is missing or damaged.
    """

    def __init__(self, index: CommittedIndex) -> None:
        self.index = index
        self.layout = Layout(index.root)
        self._entries: dict[int, dict[str, FileEntry]] = {}
        for shard, file in read_shard_tables(index.root, index.manifest.shard_tables):
            self._entries.setdefault(shard, {})[file.path] = file

    def entry(self, shard: int, path: Path) -> FileEntry:
        """Return the file entry of the file at `path`, which belongs to `shard`.

        Raises:
            CorruptIndexError: the shard table does not list the file.
        """
        name = self.layout.relative(path)
        entry = self._entries.get(shard, {}).get(name)
        if entry is None:
            raise CorruptIndexError(
                f"the shard table of {self.index.root} does not list {name}; run 'edje-index verify'"
            )
        return entry


@dataclass(frozen=True)
class ShardTarget:
    """Where a shard is copied to.

    Attributes:
        layout: layout of the new index.
        shard: shard number in the new index.
        plan: fingerprint of the plan, stored in the receipt.
    """

    layout: Layout
    shard: int
    plan: str


def copy_shard(
    source: CommittedShards, shard: int, target: ShardTarget, change_rows: Callable[[pa.Table], pa.Table]
) -> ShardReceipt:
    """Copy and commit the files of one shard, and write the receipt.

    Args:
        source: the shards of the index to copy from.
        shard: shard number in `source`.
        target: where to copy the shard to.
        change_rows: function that takes the rows table of the shard and returns the new rows table. If it returns its
            argument, the file is copied as it is.

    Raises:
        CorruptIndexError: a file of `source` is missing or damaged.
        OSError: a file of the new index cannot be written.
    """
    spec, root = source.index.manifest.spec, source.index.root
    staged = StagedFiles(target.layout, target.shard)
    try:
        paths = zip(data_files(source.layout, spec, shard), data_files(target.layout, spec, target.shard), strict=True)
        for number, (old, new) in enumerate(paths):
            _copy(root, source.entry(shard, old), staged, str(number), new)
        rows = source.entry(shard, source.layout.rows_file(shard))
        table = read_shard_rows(source.layout, shard, None, rows, source.index.manifest.columns)
        changed = change_rows(table)
        if changed is table:
            _copy(root, rows, staged, "rows", target.layout.rows_file(target.shard))
        else:
            write_rows(staged.path("rows"), changed)
            staged.add("rows", target.layout.rows_file(target.shard))
        receipt = receipt_of_rows(target.shard, target.plan, changed, staged.commit())
        staged.commit_receipt(receipt)
    finally:
        staged.remove()
    return receipt


def _copy(root: Path, entry: FileEntry, staged: StagedFiles, name: str, final: Path) -> None:
    copy_file(root, entry, staged.path(name))
    staged.add(name, final, entry.bytes, entry.crc32c)


def data_files(layout: Layout, spec: IndexSpec, shard: int) -> Iterator[Path]:
    """Yield the paths of all files of a shard except its rows table."""
    yield layout.embedding_shard(shard)
    for name in spec.precisions:
        yield layout.token_shard(name, shard, len(codec(name, spec.block_shape).record_shape))
        yield layout.checksums(name, shard)


@dataclass(frozen=True)
class NewIndex:
    """The members of `index.json` of a new index that is made of copied shards.

    Attributes:
        spec: shape of the new index.
        model: description of the model.
        settings: settings of the build.
        plan: fingerprint of the plan.
        change: what made the index, with the member `kind`.
        deleted: the deleted rows.
        next_shard: lowest shard number that is free for new rows.
        columns: source columns.
        encoded_from: see `Manifest.encoded_from`.
    """

    spec: IndexSpec
    model: dict[str, Any]
    settings: dict[str, Any]
    plan: str
    change: dict[str, Any]
    deleted: Tombstones
    next_shard: int
    columns: tuple[SourceColumn, ...]
    encoded_from: Mapping[str, tuple[str, ...]]


def commit_new_index(target: Path, new: NewIndex, receipts: Sequence[ShardReceipt], ann: dict[str, Any]) -> Manifest:
    """Write tombstones, shard tables and `index.json` of a new index. Return the manifest.

    Args:
        target: directory of the new index.
        new: members of `index.json`.
        receipts: receipts of all shards of the new index.
        ann: value of `ann` in `index.json`, which describes the nearest-neighbour index.

    Raises:
        CorruptIndexError: a shard has no receipt.
    """
    layout, spec = Layout(target), new.spec
    check_receipts(receipts, list(spec.shard_numbers()))
    files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
    tables = [
        write_shard_table(layout, [(shard, file) for shard, file in files if shard in spec.segment_shards(segment)])
        for segment in spec.used_segments
    ]
    is_extended = bool(new.columns) or spec.used_segments[0].first_row > 0
    manifest = Manifest(
        spec=spec,
        counts=total_counts(receipts),
        model=new.model,
        settings=new.settings,
        plan=new.plan,
        shard_table=tables[0],
        ann=ann,
        created_by=created_by(),
        format_version=EXTENDED_VERSION if is_extended else SNAPSHOT_VERSION,
        encoded_from=dict(new.encoded_from),
        snapshot=Snapshot(
            change=new.change,
            next_shard=new.next_shard,
            deleted=write_tombstones(layout, new.deleted) if len(new.deleted) else None,
            deleted_rows=len(new.deleted),
        ),
        further_tables=tuple(tables[1:]),
        columns=new.columns,
    )
    manifest.write(layout)
    return manifest
