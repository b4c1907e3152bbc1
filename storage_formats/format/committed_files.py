"""Lookup of file entries in the shard tables, without reading whole tables (SPEC.md
section 5).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.arrays import Ints
from storage_formats.errors import CorruptIndexError
from storage_formats.format.file_check import (
    EXCHANGED,
    FileEntry,
    open_committed,
    parsing,
)
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.shard_table import table_lines
from storage_formats.threads import fork_safe_lock


class CommittedFiles:
    """Looks up the file entries of one kind of file, for example the checksum files, in
    the shard tables. Thread-safe.

    A lookup reads the row groups that can contain the requested shards. It keeps in
    memory the length and the checksum of each file of this kind that these row groups
    list.

    Args:
        name: path of the files of this kind, relative to the index, with a field for
            the shard number. For example `layout.EMBEDDING_FILE`.
    """

    def __init__(self, index: CommittedIndex, name: str) -> None:
        self._name = name
        self._index = index
        # the opened shard tables, by the number of their segment
        self._tables: dict[int, CommittedTable] = {}
        # (length, checksum) of each file, by shard
        self._known: dict[int, tuple[int, int]] = {}
        self._lock = fork_safe_lock()

    def files(self, shards: Iterable[int]) -> dict[int, FileEntry]:
        """Return the file entry of each of `shards`, keyed by shard number. Each
        shard must belong to a segment.

        Raises:
            CorruptIndexError: a shard table is damaged, or no shard table lists the
                file of one of `shards`.
        """
        requested = list(shards)
        paths = {shard: self._name.format(shard) for shard in requested}
        with self._lock:
            self._look_up(sorted({*requested} - self._known.keys()))
            for shard in requested:
                if shard not in self._known:
                    raise CorruptIndexError(
                        f"no shard table lists {paths[shard]}", remedy="verify"
                    )
            return {
                shard: FileEntry(path, *self._known[shard])
                for shard, path in paths.items()
            }

    def _look_up(self, shards: Sequence[int]) -> None:
        """Read the row groups of the shard tables that can list one of `shards`, in
        ascending order.
        """
        spec = self._index.spec
        folder = self._name.rpartition("/")[0] + "/"
        starts = [each.first_row // spec.shard_size for each in spec.used_segments]
        # A shard belongs to the last segment that begins at or before the shard.
        for number, of_segment in itertools.groupby(
            shards, lambda shard: bisect.bisect_right(starts, shard) - 1
        ):
            if number not in self._tables:
                entry = self._index.manifest.shard_tables[number]
                self._tables[number] = CommittedTable(self._index, entry, "shard")
            table = self._tables[number]
            with parsing(f"the table {table.path}", EXCHANGED):
                for group in table.groups([*of_segment]):
                    own = group.filter(pc.starts_with(group["path"], folder))
                    for shard, file in table_lines(own):
                        if file.path == self._name.format(shard):
                            self._known[shard] = (file.bytes, file.crc32c)


class CommittedTable:
    """Reads row groups of a Parquet file that a manifest names. The file must have the
    length and the checksum of its entry.

    Args:
        key: name of the integer column by which `groups` selects row groups.
    """

    def __init__(self, index: CommittedIndex, entry: FileEntry, key: str) -> None:
        self.path = index.root / entry.path
        self._index = index
        self._entry = entry
        self._key = key
        self._groups: ParquetRowGroups | None = None

    def groups(
        self, values: Sequence[int] | Ints | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """Yield each row group that can contain one of `values` in the key column. The
        caller translates errors of a damaged file, see `parsing`.

        Args:
            values: values of the key column. None reads all row groups.
            columns: names of the columns to read. Columns that the file lacks are left
                out. None reads all columns.
        """
        self._index.fetch([self._entry])
        with open_committed(self._index.root, self._entry, only_first_use=True) as file:
            if self._groups is None:
                self._groups = ParquetRowGroups(file, self._entry.bytes, self._key)
            yield from self._groups.read(file, values, columns)
