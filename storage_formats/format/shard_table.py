"""Shard tables. A shard table lists the data files of one segment of an index (SPEC.md
section 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_formats.format.checksum import crc32c
from storage_formats.format.file_check import (
    FileEntry,
    committed_content,
    data_path,
)
from storage_formats.format.layout import SHARD_TABLE_FILE
from storage_formats.format.parquet import parquet_bytes, read_table

if TYPE_CHECKING:
    from storage_formats.format.places import Place

# Lines per row group. A row group of this size is read in about 1 ms.
_TABLE_GROUP_LINES = 4096

SHARD_TABLE_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("crc32c", pa.uint32(), nullable=False),
    ]
)


def read_shard_table(place: Place, table: FileEntry) -> list[tuple[int, FileEntry]]:
    """Read the shard table with the file entry `table`. Return a pair (shard number,
    file entry) for each line.

    Raises:
        CorruptIndexError: the table is missing or damaged.
    """
    with committed_content(place, table, "shard table") as data:
        return table_lines(read_table(data, SHARD_TABLE_SCHEMA.names))


def table_lines(table: pa.Table) -> list[tuple[int, FileEntry]]:
    """Return a pair (shard number, file entry) for each line of `table`.

    Raises:
        KeyError, ValueError, pyarrow.ArrowException: `table` does not have the columns
            of `SHARD_TABLE_SCHEMA`, or lists a path that is not that of a data file.
    """
    table = table.select(SHARD_TABLE_SCHEMA.names).cast(SHARD_TABLE_SCHEMA)
    shards, paths, *columns = (column.to_pylist() for column in table.columns)
    entries = map(FileEntry, map(data_path, paths), *columns)
    return list(zip(shards, entries, strict=True))


def write_shard_table(
    place: Place, files: Iterable[tuple[int, FileEntry]]
) -> FileEntry:
    """Write a shard table with one line per pair (shard number, file entry) in `files`,
    sorted by shard and path. Return the file entry of the table.
    """
    ordered = sorted(files, key=lambda item: (item[0], item[1].path))
    lines = [{"shard": shard, **vars(file)} for shard, file in ordered]
    table = pa.Table.from_pylist(lines, SHARD_TABLE_SCHEMA)
    data = parquet_bytes(table, compression="zstd", row_group_size=_TABLE_GROUP_LINES)
    return write_named_file(place, SHARD_TABLE_FILE, data)


def write_named_file(place: Place, name: str, data: bytes) -> FileEntry:
    """Write a file that is named after its CRC-32C, and return its entry.

    Args:
        name: relative path with a field for the CRC-32C, such as `TOMBSTONES_FILE`.
    """
    crc = crc32c(data)
    entry = FileEntry(name.format(crc), len(data), crc)
    place.write(place.root / entry.path, data)
    return entry
