"""The manifest of a new index, made from the receipts of its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from storage_formats.errors import CorruptIndexError
from storage_formats.format.filter_tables import write_filter_table
from storage_formats.format.layout import (
    EXTENDED_VERSION,
    FORMAT_VERSION,
    ROWS_FILE,
    SNAPSHOT_VERSION,
    IndexSpec,
    Layout,
    Segment,
)
from storage_formats.format.manifest import Ann, Counts, Manifest, Snapshot, created_by
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.shard_table import (
    FileEntry,
    write_named_file,
    write_shard_table,
)
from storage_formats.format.source_columns import SourceColumn
from storage_formats.format.tombstones import Tombstones


def new_manifest(
    layout: Layout,
    spec: IndexSpec,
    receipts: Sequence[ShardReceipt],
    columns: Sequence[SourceColumn] = (),
    *,
    model: dict[str, Any],
    settings: dict[str, Any],
    plan: str,
    ann: Ann,
    encoded_from: Mapping[str, tuple[str, ...]] | None = None,
    change: dict[str, Any] | None = None,
    deleted: Tombstones | None = None,
) -> Manifest:
    """Write the tables and the tombstones of a new index. Return its manifest,
    which is not written.

    Args:
        model: description of the model. The required member `fingerprint` is a hash of
            everything that determines the stored bytes.
        ann: value of `ann` in `index.json`, which describes the nearest-neighbour index
            (SPEC.md section 10).
        change: value of `change` in `index.json`, for an index that is copied from
            another; None for a build.
        deleted: deleted rows of the index; None if there are none.

    Raises:
        CorruptIndexError: a shard has no receipt, or the counts of the receipts do not
            add up.
    """
    check_receipts(receipts, list(spec.shard_numbers()))
    snapshot = Snapshot()
    version = FORMAT_VERSION
    if change is not None:
        entry = (
            write_tombstones(layout, deleted)
            if deleted is not None and len(deleted)
            else None
        )
        rows = 0 if deleted is None else len(deleted)
        snapshot = Snapshot(
            change=change, next_shard=spec.shards, deleted=entry, deleted_rows=rows
        )
        version = SNAPSHOT_VERSION
    if columns or spec.used_segments[0].first_row:
        version = EXTENDED_VERSION
    return Manifest(
        spec=spec,
        counts=total_counts(receipts),
        model=model,
        settings=settings,
        plan=plan,
        ann=ann,
        created_by=created_by(),
        format_version=version,
        encoded_from=dict(encoded_from or {}),
        snapshot=snapshot,
        columns=tuple(columns),
        **write_tables(layout, spec, receipt_lines(receipts), columns),
    )


def write_tables(
    layout: Layout,
    spec: IndexSpec,
    lines: Iterable[tuple[int, FileEntry]],
    columns: Sequence[SourceColumn],
    unchanged: Mapping[Segment, FileEntry] = MappingProxyType({}),
    unchanged_rows: Mapping[Segment, FileEntry | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """Write the shard table of each segment of `spec` that is not in `unchanged`, from
    lines (shard number, file), and the filter table of each that is not in
    `unchanged_rows`.

    Return the attributes `shard_tables` and `filter_tables` of a manifest.
    """
    lines = list(lines)
    tables = []
    filters = []
    for segment in spec.used_segments:
        shards = spec.segment_shards(segment)
        of_segment = [line for line in lines if line[0] in shards]
        if segment in unchanged:
            tables.append(unchanged[segment])
        else:
            tables.append(write_shard_table(layout, of_segment))
        if segment in unchanged_rows:
            filters.append(unchanged_rows[segment])
        else:
            rows = {
                shard: file
                for shard, file in of_segment
                if file.path == ROWS_FILE.format(shard)
            }
            filters.append(write_filter_table(layout, spec, segment, rows, columns))
    return {"shard_tables": tuple(tables), "filter_tables": tuple(filters)}


def receipt_lines(
    receipts: Iterable[ShardReceipt],
) -> Iterator[tuple[int, FileEntry]]:
    """Yield the lines of the shard tables for the files of `receipts`."""
    return ((receipt.shard, file) for receipt in receipts for file in receipt.files)


def write_tombstones(layout: Layout, tombstones: Tombstones) -> FileEntry:
    """Write a tombstones file, and return the file entry."""
    return write_named_file(layout, layout.tombstones, tombstones.to_bytes())


def total_counts(receipts: Iterable[ShardReceipt]) -> Counts:
    """Return the total counts of all receipts.

    Raises:
        CorruptIndexError: inputs differ from indexed + duplicates + failed.
    """
    counts = Counts(0, 0, 0)
    for each in receipts:
        of_shard = Counts(each.rows, each.indexed, each.duplicates, each.failed)
        counts = add_counts(counts, of_shard)
    if problem := counts.problem():
        raise CorruptIndexError(
            f"the receipts in build/receipts are damaged: {problem}; remove this"
            " directory, and run the command again"
        )
    return counts


def add_counts(left: Counts, right: Counts) -> Counts:
    """Return the sum of two counts."""
    failed = Counter(left.failed) + Counter(right.failed)
    return Counts(
        left.inputs + right.inputs,
        left.indexed + right.indexed,
        left.duplicates + right.duplicates,
        dict(sorted(failed.items())),
    )


def check_receipts(receipts: Sequence[ShardReceipt], shards: Sequence[int]) -> None:
    """Raise CorruptIndexError unless there is exactly one receipt for each of
    `shards`.
    """
    receipt_shards = sorted(receipt.shard for receipt in receipts)
    if receipt_shards != list(shards):
        raise CorruptIndexError(
            f"{len(shards)} shards need one receipt each, but there are receipts for"
            f" {len(set(receipt_shards))} shards; run the same command again to write"
            " the missing shards"
        )
