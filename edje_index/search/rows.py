"""Looks up columns of the rows table for hits and filters."""

from __future__ import annotations

import bisect
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from storage_formats.arguments import as_text
from storage_formats.arrays import Bools, Ints
from storage_formats.atomic import Json
from storage_formats.errors import EdjeError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import (
    check_names,
    iter_row_groups,
    row_ids_of,
    row_schema,
)
from storage_formats.format.source_columns import caption_columns

# largest total size of the row groups that stay in memory, in bytes
_CACHED_BYTES = 256 << 20
# largest number of filters whose results stay in memory
_CACHED_FILTERS = 16


class FilterTimeoutError(EdjeError):
    """Evaluating a filter exceeded the time limit."""


class IndexRows:
    """The rows table of one snapshot. Thread-safe.

    The columns of a row group are read when they are first needed. Up to 256 MiB of
    columns and the results of the last 16 filters stay in memory, because opening a
    Parquet file takes more time than the rest of a search.

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
        # the columns of row groups that are in memory, by the first row id, the least
        # recently used first; and these row ids, ascending
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        self._first_rows: list[int] = []
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
        names = self._described
        if columns is not None:
            check_names(columns, self.schema.names)
            names = list(dict.fromkeys(columns))
        wanted = np.unique(row_ids)
        described: dict[int, tuple[str, Json]] = {}
        for table in self._tables(wanted, list(dict.fromkeys(["uri", *names]))):
            of_table = row_ids_of(table)
            start, stop = np.searchsorted(wanted, [of_table[0], of_table[-1] + 1])
            for row_id in wanted[start:stop].tolist():
                position = int(np.searchsorted(of_table, row_id))
                values = {name: table[name][position].as_py() for name in names}
                described[row_id] = (table["uri"][position].as_py(), values)
        return [described[row_id] for row_id in row_ids.tolist()]

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
                read = dict.fromkeys(["row_id", *columns])
                for table in iter_row_groups(self._index, read):
                    if time.monotonic() > until:
                        raise FilterTimeoutError(
                            "the filter took too long; write a simpler filter or try"
                            " again later"
                        )
                    mask[row_ids_of(table)] = passes(table)
                mask[self._index.deleted.row_ids] = False
                self._results[where] = mask
                while len(self._results) > _CACHED_FILTERS:
                    self._results.popitem(last=False)
            return self._results[where]

    def _tables(self, row_ids: Ints, names: Sequence[str]) -> list[pa.Table]:
        """Return the row groups with the rows `row_ids`, int64 [k], ascending. Each has
        the column `row_id` and at least the columns `names`.
        """
        tables: dict[int, pa.Table] = {}
        read = {"row_id", *names}
        is_missing = np.ones(len(row_ids), np.bool_)
        with self._lock:
            numbers = np.searchsorted(self._first_rows, row_ids, side="right") - 1
            for number in np.unique(numbers[numbers >= 0]).tolist():
                first = self._first_rows[number]
                table = self._groups[first]
                if not {*names} <= {*table.column_names}:
                    read.update(table.column_names)
                    continue
                # Other rows may be in later row groups, which are not in memory.
                is_missing &= (numbers != number) | (row_ids > row_ids_of(table)[-1])
                tables[first] = table
                self._groups.move_to_end(first)
        if is_missing.any():
            for table in iter_row_groups(self._index, read, row_ids[is_missing]):
                first = table["row_id"][0].as_py()
                tables[first] = table
                self._keep(first, table)
        return list(tables.values())

    def _keep(self, first: int, table: pa.Table) -> None:
        """Keep a row group in memory. If the row groups in memory then exceed
        `_CACHED_BYTES`, the least recently used ones are removed.
        """
        with self._lock:
            if first in self._groups:
                self._bytes -= self._groups.pop(first).nbytes
            else:
                bisect.insort(self._first_rows, first)
            self._groups[first] = table
            self._bytes += table.nbytes
            while self._bytes > _CACHED_BYTES:
                oldest, removed = self._groups.popitem(last=False)
                self._first_rows.remove(oldest)
                self._bytes -= removed.nbytes
