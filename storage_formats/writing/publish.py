"""Writes the tables that the manifest of an index names, and sums up its counts, from
the receipts of the shards.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage_formats.atomic import Json
from storage_formats.errors import CorruptIndexError
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import (
    REMOVED_FILE,
    ROWS_FILE,
    TOMBSTONES_FILE,
    IndexSpec,
    Segment,
)
from storage_formats.format.manifest import (
    CommittedIndex,
    Counts,
    Manifest,
    RowsFile,
    Snapshot,
)
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    VALUE_SCHEMA,
    cast_columns,
    iter_row_groups,
    read_staged_rows,
    row_ids_of,
    stored_schema,
    with_values,
)
from storage_formats.format.shard_table import write_named_file, write_shard_table
from storage_formats.format.source_columns import SourceColumn
from storage_formats.format.tombstones import Tombstones

# A row group has at most `_GROUP_ROWS` rows and about `_GROUP_BYTES` bytes in memory,
# and a file ends at the next shard after `_FILE_ROWS` rows or `_FILE_BYTES` bytes.
_GROUP_ROWS = 8192
_GROUP_BYTES = 16 << 20
_FILE_ROWS = 1 << 16
_FILE_BYTES = 64 << 20

Staged = Mapping[int, FileEntry]
"""The receipt's entry of the rows of each written shard, by number."""


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


def write_rows_files(
    place: Place,
    spec: IndexSpec,
    columns: Sequence[SourceColumn],
    staged: Staged,
    before: CommittedIndex | None = None,
    values: pa.Table | None = None,
) -> tuple[RowsFile, ...]:
    """Write the rows files of an index after a change, except those that the change
    leaves as they are. Return all of them, in row order. No file is overwritten,
    because each is named after its contents.

    New rows are written to new files. A new file takes over the rows of files before it
    that have at most twice as many, so the number of small files grows with the
    logarithm of the number of changes, and each row is rewritten only a few times.

    Args:
        spec: shape of the index after the change.
        columns: source columns of the index after the change.
        staged: rows of the shards that the change wrote. They replace those of the same
            shards in `before`.
        before: the index before the change; None if the index is new.
        values: new values of rows, see `with_values`; None for none.
    """
    values = VALUE_SCHEMA.empty_table() if values is None else values
    values = values.sort_by("row_id")
    changed = np.union1d(
        row_ids_of(values) // spec.shard_size, np.array([*staged], np.int64)
    )
    # the shards (first, stop) of each file in row order, and the file if it stays
    planned: list[tuple[int, int, RowsFile | None]] = []
    stop = 0
    old_files = () if before is None else before.manifest.rows_files
    for position, file in enumerate(old_files):
        assert before is not None
        stop = before.manifest.stop_shard(position)
        first, last = np.searchsorted(changed, [file.first_shard, stop])
        kept = file if first == last else None
        planned.append((file.first_shard, stop, kept))
    new = sorted(shard for shard in staged if shard >= stop)
    if new:
        first = new[0]
        rows = _rows(spec, first, spec.shards)
        while planned:
            start = planned[-1][0]
            of_earlier = _rows(spec, start, first)
            if of_earlier > 2 * rows or of_earlier >= _FILE_ROWS:
                break
            planned.pop()
            first = start
            rows += of_earlier
        planned.append((first, spec.shards, None))
    files = list[RowsFile]()
    for first, stop, kept in planned:
        if kept is not None:
            files.append(kept)
            continue
        tables = _tables(place, spec, columns, first, stop, staged, before)
        changed_tables = (with_values(table, values) for table in tables)
        files += _write(place, changed_tables, spec.shard_size)
    return tuple(files)


def _rows(spec: IndexSpec, first_shard: int, stop_shard: int) -> int:
    return sum(map(len, spec.used_ranges(first_shard, stop_shard)))


def _tables(
    place: Place,
    spec: IndexSpec,
    columns: Sequence[SourceColumn],
    first_shard: int,
    stop_shard: int,
    staged: Staged,
    before: CommittedIndex | None,
) -> Iterator[pa.Table]:
    """Yield the rows of the shards `first_shard`..`stop_shard` - 1 after a change, in
    row order, with the columns of `stored_schema`. Each table has rows of one shard.
    """
    schema = stored_schema(columns)

    def written(shard: int) -> pa.Table:
        return read_staged_rows(place, shard, None, staged[shard], columns)

    old_stop = 0
    if before is not None:
        old_stop = before.spec.shards
        starts = [each.first_shard for each in before.manifest.rows_files]
        limits = [first_shard, min(stop_shard, old_stop)]
        positions = range(*np.searchsorted(starts, limits).tolist())
        for group in iter_row_groups(before, files=positions):
            table = cast_columns(group, schema)
            row_ids = row_ids_of(table)
            shards = np.unique(
                row_ids // spec.shard_size, return_index=True, return_counts=True
            )
            for shard, first, count in np.transpose(shards).tolist():
                if shard not in staged:
                    yield table.slice(first, count)
                elif row_ids[first] == spec.shard_rows(shard).start:
                    # The shard may have rows in the next row group, too.
                    yield written(shard)
    for shard in range(max(first_shard, old_stop), stop_shard):
        if shard in staged:
            yield written(shard)


def _write(
    place: Place, tables: Iterable[pa.Table], shard_size: int
) -> Iterator[RowsFile]:
    """Write `tables`, none of which has rows of several shards, to one or more files.
    Yield each file after it is on disk.
    """
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in itertools.chain(tables, [None]):
        begins_shard = table is None or row_ids_of(table)[0] % shard_size == 0
        is_full = rows >= _FILE_ROWS or size >= _FILE_BYTES or table is None
        if waiting and is_full and begins_shard:
            first_shard = int(row_ids_of(waiting[0])[0]) // shard_size
            group_rows = max(1, min(_GROUP_ROWS, rows * _GROUP_BYTES // size))
            sink = pa.BufferOutputStream()
            joined = pa.concat_tables(waiting)
            pq.write_table(joined, sink, group_rows, compression="zstd")
            data = sink.getvalue().to_pybytes()
            yield RowsFile(first_shard, write_named_file(place, ROWS_FILE, data))
            waiting.clear()
            rows = size = 0
        if table is not None:
            waiting.append(table)
            rows += len(table)
            size += table.nbytes


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
