"""Lookup of file entries in the shard tables, without reading whole tables (SPEC.md
section 5).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.file_check import EXCHANGED, FileEntry, open_committed
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.shard_table import SHARD_TABLE_SCHEMA, table_lines
from storage_formats.threads import fork_safe_lock

_LINE = np.dtype([("shard", "i8"), ("bytes", "i8"), ("crc32c", "u4")])
# Number of shards that are looked up at once. The lines of 1,024 consecutive shards are
# in one or a few row groups of a shard table.
_SHARDS_PER_READ = 1024

T = TypeVar("T")


class CommittedFiles:
    """Looks up the file entries of one kind of file, for example the rows files, in the
    shard tables. Thread-safe.

    A lookup reads the row groups that can contain the requested shards. It keeps in
    memory the length and the checksum of each file of this kind that these row groups
    list, 20 bytes per shard.

    Args:
        name: path of the files of this kind, relative to the index, with a field for
            the shard number. For example `layout.ROWS_FILE`.
    """

    def __init__(self, index: CommittedIndex, name: str) -> None:
        self._spec = index.spec
        self._name = name
        self._index = index
        # the opened shard tables, keyed by the position of their segment in
        # `used_segments`
        self._tables: dict[int, CommittedTable] = {}
        # the lines read so far, sorted by shard
        self._lines = np.empty(0, _LINE)
        self._shards = self._lines["shard"]
        self._lock = fork_safe_lock()

    def files(self, shards: Iterable[int]) -> dict[int, FileEntry]:
        """Return the file entry of each of `shards`, keyed by shard number. Each
        shard must belong to a segment.

        Raises:
            CorruptIndexError: a shard table is damaged, or no shard table lists the
                file of one of `shards`.
        """
        requested = np.fromiter(shards, dtype=np.int64)
        with self._lock:
            missing = requested[~np.isin(requested, self._shards)]
            if len(missing):
                self._load(sorted({*missing.tolist()}))
            lines = self._lines[np.searchsorted(self._shards, requested)]
        return {
            shard: FileEntry(self._name.format(shard), length, crc)
            for shard, length, crc in lines.tolist()
        }

    def _load(self, missing: list[int]) -> None:
        """Read the lines of the shards `missing` from the shard tables. `missing` must
        be ascending.
        """
        parts = [self._lines]
        segments = self._spec.used_segments
        tables = self._index.manifest.shard_tables
        starts = [segment.first_row // self._spec.shard_size for segment in segments]
        # A shard belongs to the last segment that begins at or before the shard.
        # `segment` is the position of this segment in `segments`.
        for segment, shards in itertools.groupby(
            missing, lambda shard: bisect.bisect_right(starts, shard) - 1
        ):
            if segment not in self._tables:
                self._tables[segment] = CommittedTable(
                    self._index, tables[segment], "shard"
                )
            parts += self._tables[segment].groups(list(shards), self._own)
        lines = np.concatenate(parts)
        self._shards, first = np.unique(lines["shard"], return_index=True)
        self._lines = lines[first]
        for shard in np.setdiff1d(missing, self._shards).tolist():
            raise CorruptIndexError(
                f"no shard table lists {self._name.format(shard)}", remedy="verify"
            )

    def _own(self, group: pa.Table) -> NDArray[np.void]:
        """Return the lines of `group`, a row group of a shard table, that belong to
        files with the name `self._name` of any shard. The result is an array with the
        fields of `_LINE`.
        """
        group = group.select(SHARD_TABLE_SCHEMA.names).cast(SHARD_TABLE_SCHEMA)
        folder = self._name.rpartition("/")[0] + "/"
        group = group.filter(pc.starts_with(group["path"], folder))
        # If pandas is installed, `to_numpy` would import it, which takes 0.25 s.
        columns = (group[name].to_pylist() for name in SHARD_TABLE_SCHEMA.names)
        lines = [
            (shard, length, crc)
            for shard, path, length, crc in zip(*columns, strict=True)
            if path == self._name.format(shard)
        ]
        return np.array(lines, dtype=_LINE)


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
    spec = index.spec
    for segment, entry in zip(
        spec.used_segments, index.manifest.shard_tables, strict=True
    ):
        table = CommittedTable(index, entry, "shard")
        of_segment = spec.segment_shards(segment)
        start, stop = (
            bisect.bisect_left(shards, shard)
            for shard in (of_segment.start, of_segment.stop)
        )
        for first in range(start, stop, _SHARDS_PER_READ):
            group = list(shards[first : min(first + _SHARDS_PER_READ, stop)])
            files: dict[int, dict[str, FileEntry]] = {shard: {} for shard in group}
            for lines in table.groups(group, table_lines):
                for shard, file in lines:
                    if shard in files:
                        files[shard][file.path] = file
            yield from files.items()


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
