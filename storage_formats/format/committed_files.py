"""Looking up committed files in the shard table (SPEC.md section 5), without reading the whole table."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c, crc32c_stream
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.shard_table import SHARD_TABLE_SCHEMA, FileEntry

_REMEDY = (
    "it was damaged or exchanged with another, or the index was replaced while it was open. Open the index again; if "
    "the error stays, run 'edje-index verify'"
)


class CommittedFiles:
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
