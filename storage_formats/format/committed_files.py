"""Lookup of file entries in the shard tables, without reading whole tables (SPEC.md
section 5).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.file_check import EXCHANGED, FileEntry, open_committed
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.shard_table import table_lines
from storage_formats.threads import fork_safe_lock

# Number of shards that are looked up at once. The lines of 1,024 consecutive shards are
# in one or a few row groups of a shard table.
_SHARDS_PER_READ = 1024

T = TypeVar("T")


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
            missing = sorted({*requested} - self._known.keys())
            for _, lines in _read_lines(self._index, self._tables, missing, self._own):
                self._known.update(lines)
            for shard in missing:
                if shard not in self._known:
                    raise CorruptIndexError(
                        f"no shard table lists {paths[shard]}", remedy="verify"
                    )
            return {
                shard: FileEntry(path, *self._known[shard])
                for shard, path in paths.items()
            }

    def _own(self, group: pa.Table) -> dict[int, tuple[int, int]]:
        """Return the length and the checksum of each file of this kind that `group`, a
        row group of a shard table, lists, by shard.
        """
        folder = self._name.rpartition("/")[0] + "/"
        return {
            shard: (file.bytes, file.crc32c)
            for shard, file in table_lines(
                group.filter(pc.starts_with(group["path"], folder))
            )
            if file.path == self._name.format(shard)
        }


def iter_shard_files(
    index: CommittedIndex, shards: Sequence[int]
) -> Iterator[tuple[int, dict[str, FileEntry]]]:
    """Yield (shard number, entries of the files of this shard in the shard tables,
    keyed by path) for each of `shards`.

    For a shard that no table lists, the mapping of entries is empty. Memory use does
    not depend on the number of shards.

    Args:
        shards: shard numbers, ascending. Each shard must belong to a segment.
    """
    tables: dict[int, CommittedTable] = {}
    for start in range(0, len(shards), _SHARDS_PER_READ):
        group = shards[start : start + _SHARDS_PER_READ]
        files: dict[int, dict[str, FileEntry]] = {shard: {} for shard in group}
        for of_segment, lines in _read_lines(index, tables, group, table_lines):
            for shard, file in lines:
                if shard in of_segment and shard in files:
                    files[shard][file.path] = file
        yield from files.items()


def _read_lines(
    index: CommittedIndex,
    opened: dict[int, CommittedTable],
    shards: Sequence[int],
    convert: Callable[[pa.Table], T],
) -> Iterator[tuple[range, T]]:
    """Yield (shards of the segment, `convert(group)`) for each row group of the shard
    tables that can list one of `shards`. See `CommittedTable.groups`.

    Args:
        opened: the opened shard tables, by the number of their segment.
        shards: shard numbers, ascending.
    """
    segments = index.spec.used_segments
    starts = [segment.first_row // index.spec.shard_size for segment in segments]
    # A shard belongs to the last segment that begins at or before the shard.
    for number, of_segment in itertools.groupby(
        shards, lambda shard: bisect.bisect_right(starts, shard) - 1
    ):
        if number not in opened:
            entry = index.manifest.shard_tables[number]
            opened[number] = CommittedTable(index, entry, "shard")
        in_segment = index.spec.segment_shards(segments[number])
        for each in opened[number].groups(list(of_segment), convert):
            yield in_segment, each


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
        self,
        values: Sequence[int] | None,
        convert: Callable[[pa.Table], T],
        columns: Sequence[str] | None = None,
    ) -> Iterator[T]:
        """Yield `convert(group)` for each row group that can contain one of `values`
        in the key column.

        Args:
            values: values of the key column. None reads all row groups.
            convert: takes a row group as a table. If it raises a KeyError, ValueError
                or Arrow error, the file counts as damaged.
            columns: names of the columns to read. Columns that the file lacks are left
                out. None reads all columns.

        Raises:
            CorruptIndexError: the file is missing or damaged.
            MachineError: this machine cannot read the file at the moment, see
                `cannot_read`.
        """
        try:
            self._index.fetch([self._entry])
            with open_committed(
                self._index.root, self._entry, only_first_use=True
            ) as file:
                if self._groups is None:
                    self._groups = ParquetRowGroups(file, self._entry.bytes, self._key)
                for group in self._groups.read(file, values, columns):
                    yield convert(group)
        except (
            OSError,
            KeyError,
            TypeError,
            ValueError,
            ArithmeticError,
            pa.ArrowException,
        ) as error:
            raise cannot_read(f"the table {self.path}", error, EXCHANGED) from error
