"""Writing of the rows files at a commit (SPEC.md section 9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_formats.atomic import naming, private_path
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.file_check import FileEntry, committed_content
from storage_formats.format.layout import ROWS_FILE, IndexSpec
from storage_formats.format.manifest import CommittedIndex, RowsFile
from storage_formats.format.parquet import read_table
from storage_formats.format.places import Place
from storage_formats.format.rows import (
    VALUE_SCHEMA,
    cast_columns,
    iter_row_groups,
    row_ids_of,
    stored_schema,
    with_values,
)
from storage_formats.format.source_columns import SourceColumn

# A row group ends when it has `_GROUP_ROWS` rows or `_GROUP_BYTES` bytes in memory, and
# a file ends at the next shard after `_FILE_ROWS` rows or `_FILE_BYTES` bytes.
_GROUP_ROWS = 8192
_GROUP_BYTES = 16 << 20
_FILE_ROWS = 1 << 16
_FILE_BYTES = 64 << 20

Staged = Mapping[int, FileEntry]
"""The receipt's entry of the rows of each written shard, by number."""


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
    # (first shard, stop, file if it stays) of each file after the change, in row order
    parts: list[tuple[int, int, RowsFile | None]] = []
    stop = 0
    if before is not None:
        for position, file in enumerate(before.manifest.rows_files):
            stop = before.manifest.stop_shard(position)
            limits = np.searchsorted(changed, [file.first_shard, stop])
            is_unchanged = limits[0] == limits[1]
            parts.append((file.first_shard, stop, file if is_unchanged else None))
    new = sorted(shard for shard in staged if shard >= stop)
    if new:
        first = new[0]
        rows = _rows(spec, first, spec.shards)
        while parts:
            start = parts[-1][0]
            of_earlier = _rows(spec, start, first)
            if of_earlier > 2 * rows or of_earlier >= _FILE_ROWS:
                break
            parts.pop()
            first = start
            rows += of_earlier
        parts.append((first, spec.shards, None))
    files = list[RowsFile]()
    for first, stop, unchanged in parts:
        if unchanged is not None:
            files.append(unchanged)
            continue
        tables = _tables(place, spec, columns, first, stop, staged, before)
        schema = stored_schema(columns)
        changed_tables = (with_values(table, values) for table in tables)
        files += _write(place, schema, changed_tables, spec.shard_size)
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
    row order, with the columns of `stored_schema`.
    """
    schema = stored_schema(columns)

    def written(shard: int) -> pa.Table:
        what = f"file of the rows of shard {shard},"
        with committed_content(place, staged[shard], what, advice="") as data:
            return cast_columns(read_table(data), schema)

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
    place: Place, schema: pa.Schema, tables: Iterable[pa.Table], shard_size: int
) -> Iterator[RowsFile]:
    """Write `tables`, which have the columns of `schema`, to one or more files. Yield
    each file after it is on disk.
    """
    pieces = _pieces(tables)
    table = next(pieces, None)
    while table is not None:
        first_shard = int(row_ids_of(table)[0]) // shard_size
        path = private_path(place.rows / "rows.parquet", place.staging)
        file_rows = file_bytes = 0
        with (
            naming(path),
            open(path, "xb") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            waiting: list[pa.Table] = []
            while True:
                waiting.append(table)
                table = next(pieces, None)
                rows = sum(map(len, waiting))
                size = sum(map(_size, waiting))
                is_full = file_rows + rows >= _FILE_ROWS
                is_full |= file_bytes + size >= _FILE_BYTES
                begins_shard = table is None or row_ids_of(table)[0] % shard_size == 0
                ends = table is None or (is_full and begins_shard)
                if ends or rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                    writer.write_table(pa.concat_tables(waiting), rows)
                    waiting.clear()
                    file_rows += rows
                    file_bytes += size
                if ends:
                    break
        length, crc = crc32c_file(path)
        entry = FileEntry(ROWS_FILE.format(crc), length, crc)
        place.put([(path, entry)])
        yield RowsFile(first_shard, entry)


def _pieces(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield `tables` in pieces of about `_GROUP_BYTES` at most, without empty ones."""
    for table in tables:
        step = max(1, len(table) * _GROUP_BYTES // max(1, _size(table)))
        for start in range(0, len(table), step):
            yield table.slice(start, step)


def _size(table: pa.Table) -> int:
    """Return the size of a table in memory. An item of a list counts as 32 bytes more,
    because readers may refuse a row group with more than 2^20 items.
    """
    lists = [each for each in table.columns if pa.types.is_list(each.type)]
    items = [pc.sum(pc.list_value_length(each)).as_py() or 0 for each in lists]
    return int(table.nbytes + 32 * sum(items))
