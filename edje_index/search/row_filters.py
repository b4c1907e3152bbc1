"""Finds the rows of an index that pass a filter expression."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.arguments import as_text
from storage_formats.errors import EdjeError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import iter_rows, iter_stored_rows, row_schema

_CACHED_BYTES = 256 << 20  # of columns
_CACHED_FILTERS = 16
_SLICE_ROWS = 1 << 16  # rows between two checks of the time limit


class FilterTimeoutError(EdjeError):
    """Evaluating a filter exceeded the time limit."""


class RowFilters:
    """Evaluates filter expressions over the rows of one snapshot. Thread-safe.

    A column is read when an expression first names the column. Columns and recent results are cached up to a limit.

    Args:
        index: an open index.
        with_deleted: whether deleted rows can pass.
    """

    def __init__(self, index: CommittedIndex, *, with_deleted: bool = False) -> None:
        self._index = index
        self._iter_rows = iter_stored_rows if with_deleted else iter_rows
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._results: OrderedDict[str, NDArray[np.bool_]] = OrderedDict()
        self._lock = threading.Lock()

    @name_missing_extra("search")
    def passing(self, where: str, until: float = float("inf")) -> NDArray[np.bool_]:
        """Return which rows pass, bool [rows of the index]. Unused row ids do not pass.

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

        expression = parse_where(as_text(where, "where"), filter_schema(self._index))
        with self._lock:
            if where not in self._results:
                mask = np.zeros(self._index.manifest.spec.rows, dtype=np.bool_)
                for table in self._tables(["row_id", *expression.columns]):
                    if time.monotonic() > until:
                        raise FilterTimeoutError("the filter took too long; write a simpler filter or try again later")
                    mask[table["row_id"].to_numpy()] = expression.passes(table)
                self._results[where] = mask
                while len(self._results) > _CACHED_FILTERS:
                    self._results.popitem(last=False)
            self._results.move_to_end(where)
            return self._results[where]

    def row_ids(self, where: str) -> NDArray[np.int64]:
        """Return the ids of the rows that pass, ascending, int64 [n]. Raises the errors of `passing`."""
        return np.flatnonzero(self.passing(where))

    def _tables(self, names: list[str]) -> Iterator[pa.Table]:
        """Yield pieces of the rows table with the columns `names`."""
        names = list(dict.fromkeys(names))
        missing = [name for name in names if name not in self._columns]
        if not missing:
            table = pa.table({name: self._columns[name] for name in names})
            yield from (table.slice(start, _SLICE_ROWS) for start in range(0, len(table), _SLICE_ROWS))
            return
        free = _CACHED_BYTES - sum(column.nbytes for column in self._columns.values())
        kept: list[pa.Table] = []
        for table in self._iter_rows(self._index, names):
            yield table
            free -= table.select(missing).nbytes
            if free >= 0:
                kept.append(table.select(missing))
        if free >= 0 and kept:
            whole = pa.concat_tables(kept)
            self._columns |= {name: whole[name].combine_chunks() for name in missing}


def filter_schema(index: CommittedIndex) -> pa.Schema:
    """Return the columns that a filter may name: all columns of the rows table except binary columns."""
    schema = row_schema(index.manifest.columns)
    return pa.schema([field for field in schema if not pa.types.is_binary(field.type)])
