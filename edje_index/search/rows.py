"""Looks up columns of the rows table for hits and filters."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class _RowGroup(NamedTuple):
    """A row group in memory: its row ids, ascending, and some of its columns."""

    row_ids: Ints
    columns: Mapping[str, pa.Array]
    bytes: int


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
        # the first row ids of the row groups that are in memory, ascending, and the row
        # groups by these row ids
        self._cached: tuple[list[int], dict[int, _RowGroup]] = ([], {})
        # All columns that were read so far are read together, so that callers with
        # different columns do not replace the row groups of each other.
        self._names = {"row_id"}
        self._results: dict[str, Bools] = {}
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
        groups = self._groups_of(row_ids.tolist(), {"uri", *names})
        described: list[tuple[str, Json]] = []
        for row_id, group in groups:
            position = int(group.row_ids.searchsorted(row_id))
            values = {name: group.columns[name][position].as_py() for name in names}
            described.append((group.columns["uri"][position].as_py(), values))
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
                    del self._results[next(iter(self._results))]
            return self._results[where]

    def _groups_of(
        self, row_ids: Sequence[int], names: set[str]
    ) -> list[tuple[int, _RowGroup]]:
        """Return each of `row_ids` with its row group. It has the columns `names`."""
        self._names |= names
        first_rows, cached = self._cached
        groups: dict[int, _RowGroup] = {}
        for row_id in row_ids:
            at = bisect.bisect_right(first_rows, row_id) - 1
            if at < 0:
                continue
            group = cached[first_rows[at]]
            # Later rows may be in row groups that are not in memory.
            if row_id <= group.row_ids[-1] and names <= group.columns.keys():
                groups[row_id] = group
        if missing := sorted({*row_ids} - groups.keys()):
            read = [*self._names]
            for table in iter_row_groups(self._index, read, np.array(missing)):
                columns = {name: table[name].combine_chunks() for name in read}
                group = _RowGroup(row_ids_of(table), columns, table.nbytes)
                ends = bisect.bisect_right(missing, group.row_ids[-1])
                groups.update(dict.fromkeys(missing[:ends], group))
                del missing[:ends]
                first = int(group.row_ids[0])
                # All other row groups are dropped if they would be too large together.
                # A tuple is replaced at once, so other threads need no lock.
                kept = {**self._cached[1], first: group}
                if sum(each.bytes for each in kept.values()) > _CACHED_BYTES:
                    kept = {first: group}
                self._cached = (sorted(kept), kept)
        return [(row_id, groups[row_id]) for row_id in row_ids]
