"""Lookup of file entries in the shard tables, without reading whole tables (SPEC.md
section 5).
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.checksum import crc32c_stream
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.shard_table import (
    EXCHANGED,
    SHARD_TABLE_SCHEMA,
    FileEntry,
    table_lines,
)

# about 20 MB
_KEPT_ENTRIES = 1 << 16
# their lines are in one or a few row groups
_SHARDS_PER_READ = 1024


class CommittedFiles:
    """Looks up file entries in the shard tables for one kind of file, for example the
    rows files. Thread-safe.

    A lookup reads only the row groups that can contain the requested shards.

    Args:
        path: function that takes a shard number and returns the path of the file, for
            example `layout.rows_file`.
    """

    def __init__(self, index: CommittedIndex, path: Callable[[int], Path]) -> None:
        self._layout = Layout(index.root)
        self._spec = index.manifest.spec
        self._path = path
        self._tables = [_Table(index, entry) for entry in index.manifest.shard_tables]
        self._files: dict[int, FileEntry] = {}
        self._lock = threading.Lock()

    def files(self, shards: Iterable[int]) -> dict[int, FileEntry]:
        """Return the file entry of each of `shards`, keyed by shard number. Each
        shard must belong to a segment.
        """
        requested = list(shards)
        with self._lock:
            missing = [shard for shard in requested if shard not in self._files]
            for segment, table in zip(
                self._spec.used_segments, self._tables, strict=True
            ):
                of_segment = self._spec.segment_shards(segment)
                if here := [shard for shard in missing if shard in of_segment]:
                    self._load(table, here)
            files = {shard: self._files[shard] for shard in requested}
            if len(self._files) > _KEPT_ENTRIES:
                self._files = dict(files)
            return files

    def _load(self, table: _Table, shards: list[int]) -> None:
        for shard, file in table.lines(shards):
            if file.path == self._layout.relative(self._path(shard)):
                self._files[shard] = file
        for shard in shards:
            if shard not in self._files:
                raise CorruptIndexError(
                    f"the shard table {table.path} does not list {self._path(shard)}",
                    remedy="verify",
                )


def iter_shard_files(
    index: CommittedIndex, shards: Sequence[int]
) -> Iterator[tuple[int, dict[str, FileEntry]]]:
    """Yield each of `shards` with the entries of its files in the shard tables, keyed
    by path.

    A shard that no table lists has no entries. Memory use does not depend on the number
    of shards.

    Args:
        shards: shard numbers, ascending. Each shard must belong to a segment.
    """
    spec = index.manifest.spec
    for segment, entry in zip(
        spec.used_segments, index.manifest.shard_tables, strict=True
    ):
        table = _Table(index, entry)
        of_segment = spec.segment_shards(segment)
        start, stop = (
            bisect.bisect_left(shards, shard)
            for shard in (of_segment.start, of_segment.stop)
        )
        for first in range(start, stop, _SHARDS_PER_READ):
            group = list(shards[first : min(first + _SHARDS_PER_READ, stop)])
            files: dict[int, dict[str, FileEntry]] = {shard: {} for shard in group}
            for shard, file in table.lines(group):
                files[shard][file.path] = file
            yield from files.items()


class _Table:
    """Reads one shard table. The table must match the checksum in the manifest."""

    def __init__(self, index: CommittedIndex, entry: FileEntry) -> None:
        self.path = index.root / entry.path
        self._index = index
        self._entry = entry
        self._groups: ParquetRowGroups | None = None
        self._identity: tuple[int, ...] = ()

    def lines(self, shards: list[int]) -> list[tuple[int, FileEntry]]:
        """Return a pair (shard number, file entry) for each line of the table for
        `shards`.
        """
        # `pa.array` would import pandas, which takes 0.25 s.
        wanted = pa.py_buffer(np.array(shards, dtype=np.int32))
        requested = pa.Array.from_buffers(pa.int32(), len(shards), [None, wanted])
        try:
            self._index.fetch([self._entry])
            with open_index_file(self._index.root, self.path) as file:
                self._open(file)
                assert self._groups is not None
                lines: list[tuple[int, FileEntry]] = []
                for group in self._groups.read(file, shards):
                    group = group.select(SHARD_TABLE_SCHEMA.names).cast(
                        SHARD_TABLE_SCHEMA
                    )
                    lines += table_lines(
                        group.filter(pc.is_in(group["shard"], requested))
                    )
                return lines
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise cannot_read(
                f"the shard table {self.path}", error, EXCHANGED
            ) from error

    def _open(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity == self._identity:
            return
        # else the file may be of any length
        has_length = status.st_size == self._entry.bytes
        if not has_length or crc32c_stream(file) != self._entry.crc32c:
            raise CorruptIndexError(
                f"the shard table {self.path} does not match index.json: {EXCHANGED}"
            )
        file.seek(0)
        self._groups = ParquetRowGroups(file, status.st_size, "shard")
        self._identity = identity
