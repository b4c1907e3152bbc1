"""Looks up columns of the rows table for hits and filters."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage_formats.arguments import as_text
from storage_formats.arrays import Bools, Ints
from storage_formats.atomic import Json
from storage_formats.errors import CorruptIndexError, EdjeError
from storage_formats.extras import name_missing_extra
from storage_formats.format.filter_tables import filter_schema, iter_filter_table
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import check_names, iter_stored_rows, row_schema
from storage_formats.format.source_columns import caption_columns

# largest total size of the columns that stay in memory, in bytes
_CACHED_BYTES = 256 << 20
# largest number of filters whose results stay in memory
_CACHED_FILTERS = 16
# A filter table is one file with columns of many shards. If the file has at most this
# size in bytes, it is also read for the columns of hits.
_GROUPED_BYTES = 64 << 20


class FilterTimeoutError(EdjeError):
    """Evaluating a filter exceeded the time limit."""


class IndexRows:
    """The rows table of one snapshot. Thread-safe.

    A column of a shard is read when it is first needed. Up to 256 MiB of columns and
    the results of the last 16 filters stay in memory, because opening a Parquet file
    takes more time than the rest of a search.

    Args:
        index: an open index.
        columns: names of the columns that `described` returns; None for the captions,
            if the index has any.

    Raises:
        UsageError: the rows table has no such column.
    """

    def __init__(
        self, index: CommittedIndex, columns: Sequence[str] | None = None
    ) -> None:
        self._index = index
        if columns is None:
            columns = caption_columns(index.manifest.columns)
        check_names(columns, self.schema.names)
        self._described = list(dict.fromkeys(columns))
        self._columns: OrderedDict[tuple[int, str], pa.Array] = OrderedDict()
        self._bytes = 0
        self._results: OrderedDict[str, Bools] = OrderedDict()
        self._lock = threading.Lock()
        self._filtering = threading.Lock()

    @property
    def schema(self) -> pa.Schema:
        """The columns that hits and filters may name: all columns of the rows table
        except binary columns.
        """
        schema = row_schema(self._index.manifest.columns)
        return pa.schema(
            [field for field in schema if not pa.types.is_binary(field.type)]
        )

    def described(
        self, row_ids: Ints, columns: Sequence[str] | None = None
    ) -> list[tuple[str, Json]]:
        """Return (uri, values of `columns` by name) for each of `row_ids` [k]. The row
        ids must be in use.

        If `columns` is None, the columns that were given to the constructor are used.

        Raises:
            UsageError: the rows table has no such column.
            CorruptIndexError: a file of `rows/` is damaged.
        """
        size = self._index.manifest.spec.shard_size
        names = self._described
        if columns is not None:
            check_names(columns, self.schema.names)
            names = list(dict.fromkeys(columns))
        shards = sorted({row // size for row in row_ids.tolist()})
        read = list(dict.fromkeys(["uri", *names]))
        self._read_groups(shards, read)
        tables = dict(zip(shards, self._tables(shards, read), strict=True))
        described = []
        for row in row_ids.tolist():
            columns_of_shard = zip(read, tables[row // size], strict=True)
            values = {name: each[row % size].as_py() for name, each in columns_of_shard}
            described.append((values["uri"], {name: values[name] for name in names}))
        return described

    @name_missing_extra("search")
    def passing(self, where: str, until: float = float("inf")) -> Bools:
        """Return which rows pass a filter, bool [n], for all n row ids of the index.
        Unused row ids and deleted rows do not pass.

        Args:
            where: the filter expression.
            until: time limit, as a value of `time.monotonic`.

        Raises:
            UsageError: the expression is invalid.
            FilterTimeoutError: the time limit was reached.
            CorruptIndexError: a file of `rows/` is damaged.
            MissingExtraError: Lark is not installed.
        """
        from edje_index.search.where import parse_where

        columns, passes = parse_where(as_text(where, "where"), self.schema)
        spec = self._index.manifest.spec
        # A result in memory is returned without waiting for the lock. Another thread
        # may hold the lock for a long time, to evaluate another filter.
        if (result := self._results.get(where)) is not None:
            return result
        with self._filtering:
            if where not in self._results:
                mask = np.zeros(spec.rows, dtype=np.bool_)
                for table in self._parts(columns):
                    if time.monotonic() > until:
                        raise FilterTimeoutError(
                            "the filter took too long; write a simpler filter or try"
                            " again later"
                        )
                    mask[table["row_id"].to_numpy()] = passes(table)
                mask[self._index.deleted.row_ids] = False
                self._results[where] = mask
                while len(self._results) > _CACHED_FILTERS:
                    self._results.popitem(last=False)
            return self._results[where]

    def _parts(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield tables with the columns `row_id` and `names`. Together, the tables
        contain all rows.

        A segment is a range of rows, in shards of its own. The rows are read from the
        filter table of the segment, which is one file. If the segment has no filter
        table, or if filter tables lack one of the columns, one file per shard is read.
        """
        names = [name for name in names if name != "row_id"]
        manifest = self._index.manifest
        spec = manifest.spec
        shards: list[int] = []
        has_columns = {*names} <= {*filter_schema(manifest.columns).names}
        filters = manifest.filter_tables or [None] * len(spec.used_segments)
        for segment, entry in zip(spec.used_segments, filters, strict=True):
            try:
                if has_columns and entry is not None:
                    yield from iter_filter_table(self._index, segment, entry, names)
                    continue
            except CorruptIndexError:
                # The filter table is damaged. The files of rows/, which have the same
                # values, are read in its place.
                pass
            shards += spec.segment_shards(segment)
        for shard, columns in zip(shards, self._tables(shards, names), strict=True):
            row_ids = np.array(spec.shard_rows(shard))
            try:
                table = pa.table([row_ids, *columns], ["row_id", *names])
            except pa.ArrowInvalid as error:
                raise CorruptIndexError(
                    f"the file of shard {shard} in rows/ has too few or too many rows",
                    remedy="verify",
                ) from error
            yield table

    def _read_groups(self, shards: Sequence[int], names: Sequence[str]) -> None:
        """Read those row groups of the filter tables that contain `shards`, and keep
        their columns `names` in memory.

        A row group contains many shards. A later search with hits in other shards often
        finds them in memory.
        """
        manifest = self._index.manifest
        spec = manifest.spec
        with self._lock:
            missing = [
                shard
                for shard in shards
                if any((shard, name) not in self._columns for name in names)
            ]
        if not missing or not manifest.filter_tables:
            return
        if not {*names} <= {*filter_schema(manifest.columns).names}:
            return
        for segment, entry in zip(
            spec.used_segments, manifest.filter_tables, strict=True
        ):
            of_segment = spec.segment_shards(segment)
            first_rows = [
                spec.shard_rows(shard).start for shard in missing if shard in of_segment
            ]
            if not first_rows or entry is None or entry.bytes > _GROUPED_BYTES:
                continue
            # If the filter table is damaged, `_tables` reads the same values from the
            # files of rows/.
            with contextlib.suppress(CorruptIndexError):
                for table in iter_filter_table(
                    self._index, segment, entry, names, first_rows
                ):
                    first = table["row_id"][0].as_py() // spec.shard_size
                    columns = [table[name].combine_chunks() for name in names]
                    for start in range(0, len(table), spec.shard_size):
                        shard = first + start // spec.shard_size
                        stop = min(start + spec.shard_size, len(table))
                        # A slice would hold the memory of the whole row group.
                        row_indices = pa.array(range(start, stop))
                        parts = [each.take(row_indices) for each in columns]
                        self._keep(shard, names, parts)

    def _tables(
        self, shards: Sequence[int], names: Sequence[str]
    ) -> Iterator[list[pa.Array]]:
        """Yield a list with the columns `names` for each of `shards`, which must
        ascend. Columns that are in memory are not read again.
        """
        with self._lock:
            held: dict[int, list[Any]] = {
                shard: [self._columns.get((shard, name)) for name in names]
                for shard in shards
            }
            for shard, name in itertools.product(shards, names):
                if (shard, name) in self._columns:
                    self._columns.move_to_end((shard, name))
        missing = [shard for shard, columns in held.items() if None in columns]
        read = iter_stored_rows(self._index, names, missing)
        for shard in shards:
            if None in held[shard]:
                held[shard] = [column.combine_chunks() for column in next(read).columns]
                self._keep(shard, names, held[shard])
            yield held.pop(shard)

    def _keep(
        self,
        shard: int,
        names: Sequence[str],
        columns: Sequence[pa.Array],
    ) -> None:
        """Keep the columns `names` of a shard in memory. If the columns in memory then
        exceed `_CACHED_BYTES`, the least recently used columns are removed.
        """
        with self._lock:
            for name, column in zip(names, columns, strict=True):
                if (shard, name) not in self._columns:
                    self._bytes += column.nbytes
                self._columns[shard, name] = column
            while self._bytes > _CACHED_BYTES:
                self._bytes -= self._columns.popitem(last=False)[1].nbytes
