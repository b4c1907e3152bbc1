"""Filter tables. A filter table repeats the rows of a segment in one file, with the
columns that filters compare, so that a filter need not open one file per shard (SPEC.md
section 9).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage_formats.atomic import naming, private_path
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.committed_files import CommittedTable
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import FILTER_FILE, IndexSpec, Layout, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.place import Place
from storage_formats.format.rows import (
    TIMING_COLUMNS,
    cast_columns,
    edits_of,
    read_shard_rows,
    row_schema,
    with_edits,
)
from storage_formats.format.source_columns import SourceColumn

# The timing columns are left out because they would give two builds of the same plan
# different filter tables.
_LEFT_OUT = ("uri_raw", "content_hash", *TIMING_COLUMNS)
# A row group ends after the shard with which it reaches `_GROUP_ROWS` rows or
# `_GROUP_BYTES` bytes. Readers accept up to 64 MiB of text in a row group, however
# short the file is. The last shard of a row group has at most 48 MiB of source values,
# which leaves 16 MiB for the other shards.
_GROUP_ROWS = 1 << 16
_GROUP_BYTES = 16 << 20


def filter_schema(source_columns: Sequence[SourceColumn]) -> pa.Schema:
    """Return the schema of a filter table of an index with `source_columns`."""
    return pa.schema(
        [field for field in row_schema(source_columns) if field.name not in _LEFT_OUT]
    )


def write_filter_table(
    place: Place,
    spec: IndexSpec,
    segment: Segment,
    rows_files: Mapping[int, tuple[Layout, FileEntry]],
    source_columns: Sequence[SourceColumn],
) -> FileEntry | None:
    """Write the filter table of a segment, and return its entry. Return None, without
    writing a table, for a segment with one shard, because its rows are in one file
    already.

    Args:
        rows_files: layout and entry of the rows file of each shard, keyed by shard
            number.
        source_columns: source columns of the index.
    """
    shards = spec.segment_shards(segment)
    if len(shards) < 2:
        return None
    schema = filter_schema(source_columns)
    path = private_path(place.filters / "rows", place.staging)
    with (
        naming(path),
        open(path, "xb") as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        waiting: list[pa.Table] = []
        for shard in shards:
            source, entry = rows_files[shard]
            waiting.append(
                read_shard_rows(source, shard, schema.names, entry, source_columns)
            )
            rows = sum(map(len, waiting))
            size = sum(table.nbytes for table in waiting)
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES or shard == shards[-1]:
                group = pa.concat_tables(waiting)
                writer.write_table(group, len(group))
                waiting.clear()
    length, crc = crc32c_file(path)
    entry = FileEntry(FILTER_FILE.format(crc), length, crc)
    place.put([(path, entry)])
    return entry


def iter_filter_table(
    index: CommittedIndex,
    segment: Segment,
    entry: FileEntry,
    names: Sequence[str],
    row_ids: Sequence[int] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a segment from its filter table, with edits applied. Each
    yielded table has the columns `row_id` and `names`, and the rows of one or more
    whole shards.

    Args:
        entry: entry of the filter table.
        row_ids: row ids that are wanted. Row groups without any of these rows are
            skipped, but a row group with one of them is yielded as a whole. None yields
            all rows.

    Raises:
        CorruptIndexError: the filter table or a file of edits is missing or damaged.
    """
    columns = index.manifest.columns
    schema = row_schema(columns)
    schema = pa.schema([schema.field(name) for name in ("row_id", *names)])
    source_names = {column.name for column in columns}
    edits = edits_of(index, names)
    first_row = segment.first_row
    size = index.manifest.spec.shard_size

    def convert(group: pa.Table) -> pa.Table:
        nonlocal first_row
        table = cast_columns(group, schema, source_names)
        group_ids = table["row_id"].to_numpy()
        # If `row_ids` is given, row groups may be skipped, so a row group may begin at
        # any row. Otherwise, each row group must follow the one before it.
        if row_ids is not None and len(group_ids):
            first_row = int(group_ids[0])
        stop = first_row + len(group_ids)
        # A row group must consist of whole shards of this segment.
        has_shards = (
            segment.first_row <= first_row < stop <= segment.stop
            and first_row % size == 0
            and (stop % size == 0 or stop == segment.stop)
        )
        expected = np.arange(first_row, stop)
        if not has_shards or not np.array_equal(group_ids, expected):
            raise ValueError("its rows are not those of the segment")
        if edits is not None:
            table = with_edits(table, edits, first_row)
        first_row = stop
        return table

    yield from CommittedTable(index, entry, "row_id").groups(
        row_ids, convert, schema.names
    )
    if row_ids is None and first_row != segment.stop:
        raise CorruptIndexError(f"{entry.path} does not list all rows of its segment")
