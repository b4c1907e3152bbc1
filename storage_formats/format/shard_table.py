"""The shard table, which lists all data files of an index (SPEC.md section 5)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import CorruptIndexError, remedy
from storage_formats.format.checksum import crc32c, crc32c_file, crc32c_stream, to_hex
from storage_formats.format.index_files import open_index_file, read_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.parquet import ParquetRowGroups, read_table

_TABLE_GROUP_LINES = 4096  # a reader that needs one shard reads about 1 ms of lines
_REMEDY = (
    "it was damaged or exchanged with another, or the index was replaced while it was open. Open the index again; if "
    "the error stays, run 'edje-index verify'"
)

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
    """A committed file.

    Attributes:
        path: path relative to the index.
        bytes: length.
        crc32c: CRC-32C of the contents.
    """

    path: str
    bytes: int
    crc32c: int

    @classmethod
    def of(cls, layout: Layout, path: Path) -> FileEntry:
        """The entry of a file on disk, which is read once."""
        length, crc = crc32c_file(path)
        return cls(layout.relative(path), length, crc)

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object, with a hexadecimal checksum."""
        return {"path": self.path, "bytes": self.bytes, "crc32c": to_hex(self.crc32c)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileEntry:
        """The inverse of `to_json`. KeyError, TypeError or ValueError if `value` is not its result."""
        path = str(value["path"])
        if "\0" in path:
            raise ValueError(f"a path holds a NUL character: {path!r}")
        return cls(path, int(value["bytes"]), int(value["crc32c"], 16))


def read_shard_table(root: str | Path, table: FileEntry) -> list[tuple[int, FileEntry]]:
    """(shard, file) of every line of the shard table that the manifest names as `table`.

    Raises:
        CorruptIndexError: it is missing or does not match its checksum.
    """
    path = Path(root) / table.path
    try:
        data = read_index_file(root, path, max_bytes=table.bytes)
    except OSError as error:
        action = remedy(error, "restore the file")
        raise CorruptIndexError(f"cannot read the shard table {path}: {error}; {action}") from error
    if len(data) != table.bytes or crc32c(data) != table.crc32c:
        raise CorruptIndexError(f"the shard table {path} does not match its checksum in index.json; restore the file")
    try:
        lines = read_table(data, SHARD_TABLE_SCHEMA.names).cast(SHARD_TABLE_SCHEMA)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptIndexError(f"cannot read the shard table {path}: {error}; restore the file") from error
    shards, *columns = (column.to_pylist() for column in lines.columns)
    return list(zip(shards, map(FileEntry, *columns), strict=True))


def write_shard_table(layout: Layout, files: Iterable[tuple[int, FileEntry]]) -> FileEntry:
    """Write the table of (shard, file), sorted, and return the entry of the table itself."""
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
    data = sink.getvalue().to_pybytes()
    path = layout.shard_table(crc32c(data))
    write_bytes_atomic(path, data)
    return FileEntry(layout.relative(path), len(data), crc32c(data))


class ShardTable:
    """The committed files of one kind. Reads the row groups that it needs, and keeps their lines. Thread-safe.

    Args:
        layout: the index.
        entry: the file of the shard table.
        path: path of the file of a shard, such as `layout.rows_file`.
    """

    def __init__(self, layout: Layout, entry: FileEntry, path: Callable[[int], Path]) -> None:
        self._layout = layout
        self._entry = entry
        self._path = path
        self._groups: ParquetRowGroups | None = None
        self._identity: tuple[int, ...] = ()
        self._files: dict[int, FileEntry] = {}
        self._lock = threading.Lock()

    def files(self, shards: Iterable[int]) -> dict[int, FileEntry]:
        """The file of each of `shards`.

        Raises:
            CorruptIndexError: the table cannot be read, or does not list a shard.
        """
        requested = list(shards)
        with self._lock:
            missing = [shard for shard in requested if shard not in self._files]
            if missing:
                self._load(missing)
            for shard in missing:
                if shard not in self._files:
                    raise CorruptIndexError(
                        f"the shard table {self._layout.root / self._entry.path} does not list {self._path(shard)}; "
                        "run 'edje-index verify'"
                    )
            return {shard: self._files[shard] for shard in requested}

    def check(self, shard: int, content: bytes) -> None:
        """Check the whole contents of a file.

        Raises:
            CorruptIndexError: they are not those that were committed, or the table cannot be read.
        """
        check_content(self._path(shard), self.files([shard])[shard], content)

    def _load(self, shards: list[int]) -> None:
        path = self._layout.root / self._entry.path
        try:
            with open_index_file(self._layout.root, path) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                if identity != self._identity:
                    self._check_table(path, status.st_size, crc32c_stream(file))
                    file.seek(0)
                    self._groups = ParquetRowGroups(file, status.st_size, "shard")
                    self._identity = identity
                assert self._groups is not None
                for table in self._groups.read(file, shards):
                    self._keep(table)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorruptIndexError(f"cannot read the shard table {path}: {error}; {_REMEDY}") from error

    def _check_table(self, path: Path, length: int, crc: int) -> None:
        if (length, crc) != (self._entry.bytes, self._entry.crc32c):
            raise CorruptIndexError(f"the shard table {path} is not the one that index.json names: {_REMEDY}")

    def _keep(self, table: pa.Table) -> None:
        prefix = f"{self._layout.relative(self._path(0).parent)}/"
        of_folder = table.filter(pc.starts_with(table["path"], prefix)).select(SHARD_TABLE_SCHEMA.names)
        for line in of_folder.cast(SHARD_TABLE_SCHEMA).to_pylist():
            if line["path"] == self._layout.relative(self._path(line["shard"])):
                self._files[line["shard"]] = FileEntry(line["path"], line["bytes"], line["crc32c"])


def check_content(path: Path, entry: FileEntry, content: bytes, *, row_ids: tuple[int, ...] = ()) -> None:
    """Check the whole contents of the committed file at `path`.

    Raises:
        CorruptIndexError: length or CRC-32C differ from `entry`; it names `row_ids`.
    """
    if (len(content), crc32c(content)) != (entry.bytes, entry.crc32c):
        raise CorruptIndexError(f"{path} is not the file that was committed: {_REMEDY}", row_ids=row_ids)
