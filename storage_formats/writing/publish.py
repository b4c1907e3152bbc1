"""Writes the tables that the manifest of an index names, and sums up its counts, from
the receipts of the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from storage_formats.atomic import Json
from storage_formats.errors import CorruptIndexError
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import (
    REMOVED_FILE,
    TOMBSTONES_FILE,
    IndexSpec,
    Segment,
)
from storage_formats.format.manifest import (
    CommittedIndex,
    Counts,
    Manifest,
    Snapshot,
)
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.shard_table import write_named_file, write_shard_table
from storage_formats.format.source_columns import SourceColumn
from storage_formats.format.tombstones import Tombstones
from storage_formats.writing.rows_files import write_rows_files


def write_tables(
    layout: Place,
    spec: IndexSpec,
    receipts: Sequence[ShardReceipt],
    columns: Sequence[SourceColumn],
    before: CommittedIndex | None = None,
    values: pa.Table | None = None,
) -> Json:
    """Write the shard tables of the segments of `spec`, and the rows files. Return
    values for the attributes `shard_tables` and `rows_files` of `Manifest`.

    Args:
        spec: shape of the index after the change.
        receipts: receipts of the shards that the change wrote.
        columns: source columns of the index after the change.
        before: the index before the change. Tables of unchanged segments are reused.
            None if the index is new.
        values: new values of rows, see `write_rows_files`.

    Raises:
        CorruptIndexError: a shard of a new index has no receipt.
    """
    shards = sorted(receipt.shard for receipt in receipts)
    if before is None and shards != list(spec.shard_numbers()):
        raise CorruptIndexError(
            f"{spec.used_shards} shards need one receipt each, but there are receipts"
            f" for {len(set(shards))} shards; run the same command again to write the"
            " missing shards"
        )
    erased = f"{layout.relative(layout.erased)}/"
    staged: dict[int, FileEntry] = {}
    lines: dict[str, tuple[int, FileEntry]] = {}
    for receipt in receipts:
        rows = layout.relative(layout.staged_rows(receipt.shard))
        for file in receipt.files:
            if file.path == rows:
                staged[receipt.shard] = file
            else:
                # The commit moves the files of an erasure into place.
                final = replace(file, path=file.path.removeprefix(erased))
                lines[final.path] = (receipt.shard, final)
    layout.fetch(staged.values())
    tables: dict[Segment, FileEntry] = {}
    if before is not None:
        old = before.spec
        old_tables = zip(old.used_segments, before.manifest.shard_tables, strict=True)
        tables = {
            segment: table
            for segment, table in old_tables
            if spec.precisions == old.precisions
            and staged.keys().isdisjoint(spec.segment_shards(segment))
        }
        # A new table of an existing segment needs lines of the old table, too.
        if len(tables) < len(old.used_segments):
            dropped = tuple(
                f"{folder}/{name}/"
                for name in {*old.precisions} - {*spec.precisions}
                for folder in ("tokens", "checksums")
            )
            for shard, files in before.shard_files().items():
                for file in files.values():
                    if not file.path.startswith(dropped):
                        lines.setdefault(file.path, (shard, file))
    for segment in spec.used_segments:
        in_segment = spec.segment_shards(segment)
        if segment not in tables:
            of_segment = [line for line in lines.values() if line[0] in in_segment]
            tables[segment] = write_shard_table(layout, of_segment)
    return {
        "shard_tables": tuple(tables[segment] for segment in spec.used_segments),
        "rows_files": write_rows_files(layout, spec, columns, staged, before, values),
    }


def next_first_row(manifest: Manifest) -> int:
    """Return the row id at which new shards begin. No snapshot has used this row id or
    a higher one.
    """
    spec = manifest.spec
    return max(spec.shards, manifest.snapshot.next_shard) * spec.shard_size


def write_removed(layout: Place, removed: Collection[bytes]) -> FileEntry | None:
    """Write the file with the hashes of removed inputs, and return its entry. Return
    None, without writing a file, if there are none.
    """
    if not removed:
        return None
    return write_named_file(layout, REMOVED_FILE, b"".join(sorted(removed)))


def with_tombstones(
    layout: Place, spec: IndexSpec, snapshot: Snapshot, tombstones: Tombstones
) -> Snapshot:
    """Write the tombstones file, unless no row is deleted. Return `snapshot` with the
    rows of `tombstones` as its deleted rows.
    """
    entry = None
    if len(tombstones):
        data = tombstones.to_bytes(spec.shard_size)
        entry = write_named_file(layout, TOMBSTONES_FILE, data)
    return replace(snapshot, deleted=entry, deleted_rows=len(tombstones))


def total_counts(receipts: Iterable[ShardReceipt]) -> Counts:
    """Return the sum of the counts of all receipts.

    Raises:
        CorruptIndexError: the number of inputs is not indexed + duplicates + failed.
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
