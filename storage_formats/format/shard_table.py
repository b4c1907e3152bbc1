"""Shard tables. A shard table lists the data files of one segment of an index (SPEC.md
section 5).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.checksum import crc32c, crc32c_file, to_hex
from storage_formats.format.index_files import read_index_file, relative_path
from storage_formats.format.json_values import read_json
from storage_formats.format.layout import SHARD_TABLE_FILE, Layout
from storage_formats.format.parquet import read_table

EXCHANGED = (
    "the file was damaged or replaced, or the whole index was replaced while the index"
    " was open. Open the index again; if the error remains, verify the index"
)
"""Part of error messages that explains why a file can differ from its entry, and what
to do.
"""

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


@dataclass(frozen=True)
class FileEntry:
    """The entry of a committed file in a shard table or in the manifest.

    Attributes:
        path: path of the file, relative to the index.
        bytes: length of the file in bytes.
        crc32c: CRC-32C of the whole file.
    """

    path: str
    bytes: int
    crc32c: int

    @classmethod
    def of(cls, layout: Layout, path: Path) -> FileEntry:
        """Return the file entry of the file at `path`, which lies inside the index. The
        whole file is read to compute its checksum.
        """
        length, crc = crc32c_file(path)
        return cls(layout.relative(path), length, crc)

    def to_json(self) -> dict[str, Any]:
        """Return this entry as a JSON object, with a hexadecimal checksum."""
        return {"path": self.path, "bytes": self.bytes, "crc32c": to_hex(self.crc32c)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileEntry:
        """Return the entry described by `value`, a result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a member is missing or not valid.
        """
        path = relative_path(read_json(str, value["path"], "path"))
        length = read_json(int, value["bytes"], "bytes")
        return cls(path, length, int(value["crc32c"], 16))


def check_content(
    path: str | Path,
    entry: FileEntry,
    content: bytes | NDArray[np.uint8],
    *,
    row_ids: Sequence[int] = (),
) -> None:
    """Compare `content`, read from the file at `path`, with the file entry `entry`.

    Args:
        row_ids: row ids for which the file was read.

    Raises:
        CorruptIndexError: the length or CRC-32C of `content` differs from `entry`. The
            attribute `row_ids` of the error has the row ids of the argument.
    """
    if (len(content), crc32c(content)) != (entry.bytes, entry.crc32c):
        raise CorruptIndexError(
            f"{path} is not the file that was committed: {EXCHANGED}",
            row_ids=tuple(row_ids),
        )


@contextlib.contextmanager
def committed_content(root: Path, entry: FileEntry, what: str) -> Iterator[bytes]:
    """Context manager that reads a committed file of the index at `root`, compares its
    contents with `entry`, and yields them.

    The `with` block parses the contents. A KeyError, ValueError or Arrow error in the
    block means that the file is damaged, and becomes a CorruptIndexError.

    Args:
        what: kind of the file for error messages, such as "shard table".

    Raises:
        CorruptIndexError: the file is missing or damaged.
        MachineError: this machine cannot read the file at the moment, see
            `cannot_read`.
    """
    path = root / entry.path
    try:
        data = read_index_file(root, path, max_bytes=entry.bytes)
        check_content(path, entry, data)
        yield data
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise cannot_read(
            f"the {what} {path}", error, "restore the file from a backup"
        ) from error


def read_shard_table(root: Path, table: FileEntry) -> list[tuple[int, FileEntry]]:
    """Read the shard table with the file entry `table`. Return a pair (shard number,
    file entry) for each line.

    Raises:
        CorruptIndexError: the table is missing or damaged.
    """
    with committed_content(root, table, "shard table") as data:
        return table_lines(read_table(data, SHARD_TABLE_SCHEMA.names))


def table_lines(table: pa.Table) -> list[tuple[int, FileEntry]]:
    """Return a pair (shard number, file entry) for each line of `table`.

    Raises:
        KeyError, ValueError, pyarrow.ArrowException: `table` does not have the columns
            of `SHARD_TABLE_SCHEMA`, or lists a path that could lead out of the index.
    """
    table = table.select(SHARD_TABLE_SCHEMA.names).cast(SHARD_TABLE_SCHEMA)
    shards, paths, *columns = (column.to_pylist() for column in table.columns)
    entries = map(FileEntry, map(relative_path, paths), *columns)
    return list(zip(shards, entries, strict=True))


def write_shard_table(
    layout: Layout, files: Iterable[tuple[int, FileEntry]]
) -> FileEntry:
    """Write a shard table with one line per pair (shard number, file entry) in `files`,
    sorted by shard and path. Return the file entry of the table.
    """
    ordered = sorted(files, key=lambda item: (item[0], item[1].path))
    table = pa.table(
        {
            "shard": [shard for shard, _ in ordered],
            "path": [file.path for _, file in ordered],
            "bytes": [file.bytes for _, file in ordered],
            "crc32c": [file.crc32c for _, file in ordered],
        },
        schema=SHARD_TABLE_SCHEMA,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=_TABLE_GROUP_LINES)
    return write_named_file(layout, SHARD_TABLE_FILE, sink.getvalue().to_pybytes())


def write_named_file(layout: Layout, name: str, data: bytes) -> FileEntry:
    """Write a file that is named after its CRC-32C, and return its entry.

    Args:
        name: relative path with a field for the CRC-32C, such as `EDITS_FILE`.
    """
    crc = crc32c(data)
    entry = FileEntry(name.format(crc), len(data), crc)
    write_bytes_atomic(layout.root / entry.path, data)
    return entry
