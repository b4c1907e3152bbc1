"""The rows table, with one line per input. It consists of Parquet files, each with the
rows of many shards (SPEC.md section 9).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.arguments import as_list, did_you_mean
from storage_formats.arrays import Ints
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.committed_files import table_groups
from storage_formats.format.file_check import EXCHANGED, parsing
from storage_formats.format.index_files import read_index_file
from storage_formats.format.manifest import CommittedIndex, Counts
from storage_formats.format.parquet import read_table
from storage_formats.format.places import Place
from storage_formats.format.source_columns import (
    BOOL,
    FLOAT64,
    INT64,
    STRING,
    STRINGS,
    TIMESTAMP,
    SourceColumn,
    Value,
    as_type,
)
from storage_formats.format.tombstones import (
    RowIds,
    check_row_ids,
    check_rows_in_use,
    renumbered,
)
from storage_formats.remote.urls import IndexLocation

INDEXED = "indexed"
DUPLICATE = "duplicate"
FAILED = "failed"

ROW_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("uri", pa.string(), nullable=False),
        pa.field("uri_raw", pa.binary()),
        pa.field("size", pa.int64()),
        pa.field("content_hash", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("duplicate_of", pa.int64()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("read_seconds", pa.float32()),
        pa.field("decode_seconds", pa.float32()),
        pa.field("encode_seconds", pa.float32()),
    ]
)
ARROW_TYPES = {
    BOOL: pa.bool_(),
    INT64: pa.int64(),
    FLOAT64: pa.float64(),
    STRING: pa.string(),
    TIMESTAMP: pa.timestamp("us", tz="UTC"),
    STRINGS: pa.list_(pa.string()),
}
"""The Arrow type of each type of source column."""
TIMING_COLUMNS = ("read_seconds", "decode_seconds", "encode_seconds")
SOURCE_VALUES = "edje_source_values"
"""Name of the last column of the files, which the rows table does not show. If users
have set columns of a row, it holds the values that the sources gave last to these
columns, as a JSON object.
"""
VALUE_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("value", pa.string()),
    ]
)
"""Columns of a table of new values, see `with_values`."""
_HASH_DIGITS = 64
# number of files of `rows/` that are downloaded in parallel
_FILES_AT_ONCE = 16


@dataclass
class RowEntry:
    """One line of the rows table. The fields are the columns of `ROW_SCHEMA`."""

    row_id: int
    uri: str
    uri_raw: bytes | None = None
    size: int | None = None
    content_hash: str | None = None
    status: str = INDEXED
    reason: str | None = None
    detail: str | None = None
    duplicate_of: int | None = None
    width: int | None = None
    height: int | None = None
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    encode_seconds: float = 0.0

    def fail(self, reason: str, detail: str) -> None:
        """Set the status to failed, with a short code as the reason and a description
        for people as the detail.
        """
        self.status = FAILED
        self.reason = reason
        self.detail = detail


def check_hashes(hashes: pa.Array) -> None:
    """Raise ValueError unless each of `hashes`, values of the column `content_hash`, is
    null or has the length of a SHA-256 hash in hexadecimal digits.
    """
    is_long = pc.equal(pc.binary_length(hashes), _HASH_DIGITS)
    # A regular expression for the digits would take seven times as long.
    if pc.all(pc.and_(is_long, pc.string_is_ascii(hashes))).as_py() is False:
        raise ValueError("a content hash is not one of SHA-256 in hexadecimal")


def rows_table(entries: Sequence[RowEntry]) -> pa.Table:
    """Return `entries` as a table with the columns of `ROW_SCHEMA`, in the given
    order.
    """
    return pa.Table.from_pylist([vars(entry) for entry in entries], ROW_SCHEMA)


def type_name(arrow_type: pa.DataType) -> str:
    """Return the name of an Arrow type. The types of source columns have the names in
    SPEC.md section 9, for example "float64". Any other type has the name that Arrow
    gives it.
    """
    return next(
        (name for name, each in ARROW_TYPES.items() if each == arrow_type),
        str(arrow_type),
    )


def row_schema(source_columns: Iterable[SourceColumn]) -> pa.Schema:
    """Return the schema of a rows table: the columns of `ROW_SCHEMA`, then
    `source_columns`.
    """
    return pa.schema(
        [
            *ROW_SCHEMA,
            *(
                pa.field(column.name, ARROW_TYPES[column.type])
                for column in source_columns
            ),
        ]
    )


def typed_array(values: Iterable[Value | None], column_type: str) -> pa.Array:
    """Return values of a source column, converted to the type of the column.

    Raises:
        ValueError, TypeError: a value does not match the type.
    """
    typed = [None if value is None else as_type(value, column_type) for value in values]
    return pa.array(typed, ARROW_TYPES[column_type])


def with_source_values(
    table: pa.Table,
    source_columns: Iterable[SourceColumn],
    rows: Sequence[Mapping[str, Value] | None],
) -> pa.Table:
    """Return `table`, a rows table of k rows, with `source_columns` appended.

    Args:
        rows: for each of the k rows, a mapping from column name to value, or None for a
            row without values. Missing values become null.

    Raises:
        ValueError, TypeError: a value does not match the type of its column.
    """
    for column in source_columns:
        values = ((row or {}).get(column.name) for row in rows)
        table = table.append_column(column.name, typed_array(values, column.type))
    return table


def stored_schema(source_columns: Iterable[SourceColumn]) -> pa.Schema:
    """Return the schema of the files: that of the rows table, and `SOURCE_VALUES`."""
    return row_schema(source_columns).append(pa.field(SOURCE_VALUES, pa.string()))


def read_staged_rows(
    layout: Place,
    shard: int,
    columns: list[str] | None = None,
    source_columns: Iterable[SourceColumn] = (),
) -> pa.Table:
    """Read the rows of one shard that the current change has written, in row order. The
    file is not compared with its checksum.

    Args:
        columns: names of the columns to read. None reads all columns that the rows
            files store.
        source_columns: source columns of the index. If the file lacks a column, its
            values are null in the result. If a column has a narrower type in the file,
            its values are converted.

    Raises:
        CorruptIndexError: the file is missing or damaged.
        UsageError: `columns` contains a name that no column has.
    """
    path = layout.staged_rows(shard)
    layout.get(path)
    schema = selected(stored_schema(source_columns), columns)
    with parsing(f"the rows of shard {shard} in {path}"):
        data = read_index_file(layout.root, path)
        # `row_id` is always read: if the file lacks all requested source columns, the
        # number of rows would not be known otherwise.
        names = list(dict.fromkeys([*schema.names, "row_id"]))
        return cast_columns(read_table(data, names), schema)


def with_values(table: pa.Table, values: pa.Table) -> pa.Table:
    """Return `table`, rows in ascending order, with new values.

    Args:
        values: table with the columns of `VALUE_SCHEMA`, sorted by row id. Each line
            sets a column of a row to `value`, which is JSON text; null removes the
            value. Lines of rows that are not in `table` are ignored. No two lines have
            the same row and column.
    """
    if not len(table):
        return table
    row_ids = row_ids_of(table)
    limits = [row_ids[0], row_ids[-1] + 1]
    start, stop = np.searchsorted(row_ids_of(values), limits).tolist()
    new: dict[str, dict[int, str | None]] = {}
    for line in values.slice(start, stop - start).to_pylist():
        position = int(np.searchsorted(row_ids, line["row_id"]))
        if row_ids[position] == line["row_id"]:
            new.setdefault(line["column"], {})[position] = line["value"]
    for name, of_column in new.items():
        number = table.schema.get_field_index(name)
        field = table.schema.field(number)
        column = table[name].to_pylist()
        for position, text in of_column.items():
            value = None if text is None else json.loads(text)
            if value is not None:
                value = as_type(value, type_name(field.type))
            column[position] = value
        table = table.set_column(number, field, pa.array(column, field.type))
    return table


def row_ids_of(table: pa.Table) -> Ints:
    """Return the column `row_id` of a table without null row ids, int64 [k]."""
    # `to_numpy` would import pandas if it is installed, which takes 0.25 s.
    return np.from_dlpack(table["row_id"].combine_chunks()).astype(np.int64, copy=False)


def selected(schema: pa.Schema, columns: Iterable[str] | None) -> pa.Schema:
    """Return the fields of `schema` with the names `columns`; None selects all.

    Raises:
        UsageError: `columns` contains a name that no field has.
    """
    if columns is None:
        return schema
    names = list(columns)
    shown_names = [name for name in schema.names if name != SOURCE_VALUES]
    check_names([name for name in names if name != SOURCE_VALUES], shown_names)
    return pa.schema([schema.field(name) for name in dict.fromkeys(names)])


def cast_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of `table` that `schema` names, converted to its types. A
    column that is not a standard one may be missing in `table`, so that its values are
    null in the result, or have a narrower type.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: a column cannot be converted.
    """
    arrays = []
    for field in schema:
        if field.name in ROW_SCHEMA.names:
            column = table[field.name]
        elif field.name not in table.schema.names:
            column = pa.nulls(len(table), field.type)
        else:
            column = table[field.name]
            if column.type not in ARROW_TYPES.values():
                raise ValueError(
                    f"a source column has the type {column.type}, which source columns"
                    " cannot have"
                )
            if column.type != field.type:
                column = typed_array(column.to_pylist(), type_name(field.type))
        arrays.append(column)
    # `cast` raises an error if a column that must not have nulls has one, or if values
    # cannot be converted.
    return pa.Table.from_arrays(arrays, names=schema.names).cast(schema)


def check_names(columns: Iterable[str], names: Sequence[str]) -> None:
    """Raise UsageError if one of `columns` is not in `names`, the column names of a
    rows table.
    """
    columns = as_list(columns, "columns", "names")
    if unknown := sorted({*map(str, columns)} - {*names}):
        hint = did_you_mean(unknown[0], names)
        raise UsageError(
            f"the rows have no column {unknown[0]}{hint}; choose from:"
            f" {', '.join(standard_last(names))}",
            parameter="columns",
        )


def standard_last(names: Iterable[str]) -> list[str]:
    """Return the column names `names`, with those that every index has at the end."""
    return sorted(names, key=ROW_SCHEMA.names.__contains__)


def iter_rows(
    index: CommittedIndex, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the rows that are not deleted, in row order, as one table per row group.

    Args:
        columns: names of the columns to read. None reads all columns.

    Raises:
        UsageError: `columns` contains a name that no column has.
        CorruptIndexError: a file is missing or damaged.
    """
    if columns is None:
        columns = row_schema(index.manifest.columns).names
    names = as_list(columns, "columns", "names")
    for table in iter_row_groups(index, ["row_id", *names]):
        is_deleted = index.deleted.contain(row_ids_of(table))
        if is_deleted.any():
            table = table.filter(pa.array(~is_deleted))
        yield table.select(names)


def iter_row_groups(
    index: CommittedIndex,
    columns: Iterable[str] | None = None,
    row_ids: Ints | None = None,
    files: Iterable[int] | None = None,
) -> Iterator[pa.Table]:
    """Yield row groups of the rows table, which include deleted rows, in row order.

    Args:
        columns: names of the columns to read: `row_id`, and others of `stored_schema`.
            None reads all of them.
        row_ids: int64 [k], ascending, ids of rows in use. Row groups without any of
            these rows are skipped. None yields all row groups.
        files: positions in `rows_files` of the files to read, ascending. None reads all
            files, or those with `row_ids`.

    Raises:
        UsageError: `columns` contains a name that no column has.
        CorruptIndexError: a file is missing or damaged.
    """
    spec = index.spec
    rows_files = index.manifest.rows_files
    fields = stored_schema(index.manifest.columns)
    if columns is not None:
        fields = selected(fields, columns)
    starts = [each.first_shard * spec.shard_size for each in rows_files]
    positions = list(range(len(rows_files)) if files is None else files)
    if row_ids is not None:
        with_rows = np.searchsorted(starts, row_ids, side="right") - 1
        positions = np.unique(with_rows).tolist()
    for number, position in enumerate(positions):
        if number % _FILES_AT_ONCE == 0:
            soon = positions[number : number + _FILES_AT_ONCE]
            index.fetch([rows_files[each].file for each in soon])
        yield from _groups(index, position, fields, row_ids)


def _groups(
    index: CommittedIndex, position: int, schema: pa.Schema, row_ids: Ints | None
) -> Iterator[pa.Table]:
    """Yield row groups of one rows file, with the columns of `schema`. For `row_ids`,
    see `iter_row_groups`.
    """
    file = index.manifest.rows_files[position]
    ranges = index.spec.used_ranges(
        file.first_shard, index.manifest.stop_shard(position)
    )
    wanted = None
    rows_left = sum(map(len, ranges))
    if row_ids is not None:
        limits = [ranges[0].start, ranges[-1].stop]
        start, stop = np.searchsorted(row_ids, limits).tolist()
        wanted = row_ids[start:stop]
        rows_left = len(wanted)
    next_row = 0
    path = index.root / file.file.path
    with parsing(f"the table {path}", EXCHANGED):
        for group in table_groups(index, file.file, "row_id", wanted, schema.names):
            rows = cast_columns(group, schema)
            ids = row_ids_of(rows)
            if not len(ids):
                raise ValueError("it has a row group without rows")
            if "content_hash" in rows.column_names:
                check_hashes(rows["content_hash"])
            first = int(ids[0])
            stop = int(ids[-1]) + 1
            expected = [
                range(max(each.start, first), min(each.stop, stop)) for each in ranges
            ]
            # Compare the numbers first: these ranges may have more rows than fit in
            # memory. `np.array` would convert a range number by number.
            if (
                first < next_row
                or sum(map(len, expected)) != len(ids)
                or not np.array_equal(
                    np.concatenate([np.arange(r.start, r.stop) for r in expected]), ids
                )
            ):
                raise ValueError("its rows are not those of its shards, in order")
            next_row = stop
            if wanted is None:
                rows_left -= len(ids)
            else:
                before, after = np.searchsorted(wanted, [first, stop]).tolist()
                rows_left -= after - before
            yield rows
    if rows_left:
        raise CorruptIndexError(
            f"{path} does not list all rows of its shards", remedy="verify"
        )


def read_all_rows(
    index: CommittedIndex, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return all rows that are not deleted, in row order. For the arguments and
    errors, see `iter_rows`.
    """
    return pa.concat_tables(iter_rows(index, columns))


def read_rows(
    root: IndexLocation, row_ids: RowIds | None = None, columns: list[str] | None = None
) -> pa.Table:
    """Read rows of the rows table as a `pyarrow.Table`.

    Args:
        root: directory of the index, or its URL on an object store.
        row_ids: [k], row ids in any order. A row id may occur more than once. None
            reads all rows that are not deleted.
        columns: names of the columns to read, see SPEC.md section 9. None reads all
            columns.

    Returns:
        A table with k lines in the order of `row_ids`, or in row order if `row_ids` is
        None.

    Raises:
        RowIdError: a row id is out of range, belongs to no input, or was deleted
            (`DeletedRowError`).
        UsageError: there is no index at `root`, or a column in `columns` does not
            exist.
        IncompleteIndexError: the build of the index has not finished.
        CorruptIndexError: `index.json` or a file with requested rows is damaged.

    Examples:
        >>> from storage_formats import read_rows
        >>> read_rows("photos.edje", [5, 0], columns=["row_id", "status"]).to_pylist()
        [{'row_id': 5, 'status': 'indexed'}, {'row_id': 0, 'status': 'indexed'}]
    """
    return read_index_rows(CommittedIndex.open(root), row_ids, columns)


def read_index_rows(
    index: CommittedIndex,
    row_ids: RowIds | None = None,
    columns: list[str] | None = None,
) -> pa.Table:
    """Read rows like `read_rows`, but from an open index."""
    if row_ids is None:
        return read_all_rows(index, columns)
    spec = index.spec
    ids = check_row_ids(row_ids, spec.rows)
    index.deleted.refuse(ids)
    check_rows_in_use(ids, spec)
    if columns is None:
        columns = row_schema(index.manifest.columns).names
    names = as_list(columns, "columns", "names")
    wanted, lines = np.unique(ids, return_inverse=True)
    fields = selected(stored_schema(index.manifest.columns), ["row_id", *names])
    tables = [fields.empty_table()]
    for group in iter_row_groups(index, ["row_id", *names], wanted):
        is_wanted = renumbered(wanted, 0, row_ids_of(group)) >= 0
        tables.append(group.take(_indices(np.flatnonzero(is_wanted))))
    return pa.concat_tables(tables).take(_indices(lines)).select(names)


def _indices(values: Ints) -> pa.Array:
    # If pandas is installed, `pa.array` would import it, which takes longer than
    # reading the rows.
    data = pa.py_buffer(np.ascontiguousarray(values, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(values), [None, data])


def count_rows(table: pa.Table) -> Counts:
    """Return the counts of the rows in `table`, which has the columns `status` and
    `reason`.
    """
    statuses = table["status"].to_pylist()
    reasons = zip(statuses, table["reason"].to_pylist(), strict=True)
    failed = Counter(str(reason) for status, reason in reasons if status == FAILED)
    return Counts(
        len(table),
        statuses.count(INDEXED),
        statuses.count(DUPLICATE),
        dict(sorted(failed.items())),
    )
