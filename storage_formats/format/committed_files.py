"""Lookup of file entries in the shard tables, without reading whole tables (SPEC.md
section 5).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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

# number of Parquet files whose footers are kept in memory
_KEPT_FOOTERS = 64


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
        files = {}
        with self._lock:
            self._look_up(sorted({*requested} - self._known.keys()))
            for shard in requested:
                path = self._name.format(shard)
                if shard not in self._known:
                    raise CorruptIndexError(
                        f"no shard table lists {path}", remedy="verify"
                    )
                files[shard] = FileEntry(path, *self._known[shard])
        return files

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
            entry = self._index.manifest.shard_tables[number]
            with parsing(f"the table {self._index.root / entry.path}", EXCHANGED):
                for group in table_groups(self._index, entry, "shard", [*of_segment]):
                    own = group.filter(pc.starts_with(group["path"], folder))
                    for shard, file in table_lines(own):
                        if file.path == self._name.format(shard):
                            self._known[shard] = (file.bytes, file.crc32c)


def table_groups(
    index: CommittedIndex,
    entry: FileEntry,
    key: str,
    values: Sequence[int] | Ints | None,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """Yield each row group of a Parquet file of an index that can contain one of
    `values` in the integer column `key`. The file must have the length and the checksum
    of `entry`. The caller translates errors of a damaged file, see `parsing`.

    Args:
        values: values of the column `key`. None reads all row groups.
        columns: names of the columns to read. Columns that the file lacks are left out.
            None reads all columns.
    """
    index.fetch([entry])
    groups = _row_groups(index.root, entry, key)
    with open_committed(index.root, entry, only_first_use=True) as file:
        yield from groups.read(file, values, columns)


# Reading the footer of a shard table takes as long as reading some of its row groups.
@functools.lru_cache(_KEPT_FOOTERS)
def _row_groups(root: Path, entry: FileEntry, key: str) -> ParquetRowGroups:
    with open_committed(root, entry, only_first_use=True) as file:
        return ParquetRowGroups(file, entry.bytes, key)
