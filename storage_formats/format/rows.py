"""The rows table, with one line per input. One Parquet file stores the rows of one
shard (SPEC.md section 9).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.arguments import as_list, did_you_mean
from storage_formats.atomic import naming
from storage_formats.errors import UsageError, cannot_read
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.edits import Edits
from storage_formats.format.file_check import FileEntry, check_content
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import ROWS_FILE, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.parquet import read_table, table_bytes
from storage_formats.format.remote import open_index
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
from storage_formats.format.tombstones import RowIds, check_row_ids, check_rows_in_use
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


def rows_table(entries: Sequence[RowEntry]) -> pa.Table:
    """Return `entries` as a table with the columns of `ROW_SCHEMA`, in the given
    order.
    """
    columns = [
        pa.array([getattr(entry, field.name) for entry in entries], field.type)
        for field in ROW_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=ROW_SCHEMA)


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
        values = [(row or {}).get(column.name) for row in rows]
        typed = [
            None if value is None else as_type(value, column.type) for value in values
        ]
        table = table.append_column(
            column.name, pa.array(typed, ARROW_TYPES[column.type])
        )
    return table


def write_rows(path: Path, table: pa.Table) -> None:
    """Write the rows of one shard as a Parquet file."""
    with naming(path):
        path.write_bytes(table_bytes(table))


def read_shard_rows(
    layout: Layout,
    shard: int,
    columns: list[str] | None = None,
    committed: FileEntry | None = None,
    source_columns: Iterable[SourceColumn] = (),
    edits: Edits | None = None,
) -> pa.Table:
    """Read the rows of one shard, in row order.

    Args:
        columns: names of the columns to read. None reads all standard columns and all
            `source_columns`.
        committed: entry of the file in the shard table. The file must match this entry.
            None skips the comparison, for example during a build, when there is no
            shard table yet.
        source_columns: source columns of the index. If the file lacks a column, its
            values are null in the result. If a column has a narrower type in the file,
            its values are converted.
        edits: edits of the index, which replace values of source columns. None returns
            the values in the file.

    Raises:
        CorruptIndexError: the file is missing or damaged.
        UsageError: `columns` contains a name that no column has.
    """
    path = layout.rows_file(shard)
    schema = row_schema(source_columns)
    if columns is not None:
        check_names(columns, schema.names)
        schema = pa.schema([schema.field(name) for name in columns])
    try:
        most = None if committed is None else committed.bytes
        data = read_index_file(layout.root, path, max_bytes=most)
        if committed is not None:
            check_content(path, committed, data)
        source_names = set(schema.names) - set(ROW_SCHEMA.names)
        # `row_id` is always read: if the file lacks all requested source columns, the
        # number of rows would not be known otherwise.
        names = list(dict.fromkeys([*schema.names, "row_id"]))
        stored = read_table(data, names, optional=source_names)
        table = cast_columns(stored, schema, source_names)
        if edits is not None:
            table = with_edits(table, edits, shard * edits.shard_size)
        return table
    except (
        OSError,
        ValueError,
        TypeError,
        pa.ArrowException,
        # Damaged edits can also raise the errors that follow.
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:
        raise cannot_read(f"the rows of shard {shard} in {path}", error) from error


def edits_of(index: CommittedIndex, columns: Iterable[str] | None) -> Edits | None:
    """Return the edits of `index`. Return None, without reading the edits, if `columns`
    has standard columns only, which edits never change.
    """
    standard = {*ROW_SCHEMA.names}
    return None if columns is not None and standard.issuperset(columns) else index.edits


def with_edits(table: pa.Table, edits: Edits, first_row: int) -> pa.Table:
    """Return `table` with edited values in place of stored ones.

    Args:
        table: consecutive rows.
        first_row: row id of the first row of `table`.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError: the edits are damaged.
    """
    edited = edits.of_rows(first_row, len(table))
    for name in set(edited).intersection(table.column_names):
        number = table.schema.get_field_index(name)
        field = table.schema.field(number)
        values = table[name].to_pylist()
        for position, text in edited[name].items():
            value = None if text is None else json.loads(text)
            if value is not None:
                value = as_type(value, type_name(field.type))
            values[position] = value
        table = table.set_column(number, field, pa.array(values, field.type))
    return table


def cast_columns(
    table: pa.Table, schema: pa.Schema, source_names: Collection[str]
) -> pa.Table:
    """Return the columns of `table` that `schema` names, converted to its types.

    Args:
        source_names: names of the source columns in `schema`. A source column may have
            a narrower type in `table` than in `schema`. If `table` lacks a source
            column, its values are null in the result.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: a column cannot be converted.
    """
    arrays = []
    for field in schema:
        if field.name not in source_names:
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
                values = [
                    None if value is None else as_type(value, type_name(field.type))
                    for value in column.to_pylist()
                ]
                column = pa.chunked_array([pa.array(values, field.type)])
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
    """Yield one table per shard with the rows that are not deleted, in row order.

    Args:
        columns: names of the columns to read. None reads all columns.

    Raises:
        UsageError: `columns` contains a name that no column has.
        CorruptIndexError: a file is missing or damaged.
    """
    tables = iter_stored_rows(index, columns)
    for shard, table in zip(index.spec.shard_numbers(), tables, strict=True):
        is_deleted = index.deleted.contain(np.array(index.spec.shard_rows(shard)))
        yield table.filter(pa.array(~is_deleted)) if is_deleted.any() else table


def iter_stored_rows(
    index: CommittedIndex,
    columns: Sequence[str] | None = None,
    shards: Iterable[int] | None = None,
) -> Iterator[pa.Table]:
    """Yield one table per shard with all its rows, including deleted rows, in row
    order. For the errors, see `iter_rows`.

    Args:
        columns: names of the columns to read. None reads all columns.
        shards: numbers of the shards to read. None reads all shards.
    """
    names = None if columns is None else list(columns)
    if shards is None:
        shards = index.spec.shard_numbers()
    files = list(_rows_files(index, shards).items())
    edits = edits_of(index, names)
    for number, (shard, committed) in enumerate(files):
        if number % _FILES_AT_ONCE == 0:
            group = files[number : number + _FILES_AT_ONCE]
            index.fetch([entry for _, entry in group])
        yield read_shard_rows(
            index.layout,
            shard,
            names,
            committed,
            index.manifest.columns,
            edits,
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
    return read_index_rows(open_index(root), row_ids, columns)


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
    if not len(ids):
        schema = row_schema(index.manifest.columns)
        check_names(columns or (), schema.names)
        return schema.empty_table().select(columns or schema.names)
    shards, shard_indices = np.unique(ids // spec.shard_size, return_inverse=True)
    files = _rows_files(index, shards.tolist())
    layout = index.layout
    source_columns = index.manifest.columns
    index.fetch(files.values())
    edits = edits_of(index, columns)
    tables = [
        read_shard_rows(layout, shard, columns, entry, source_columns, edits)
        for shard, entry in files.items()
    ]
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
    line_indices = starts[shard_indices] + ids % spec.shard_size
    # If pandas is installed, `pa.array` would import it, which takes longer than
    # reading the rows.
    taken = pa.Array.from_buffers(
        pa.int64(),
        len(line_indices),
        [None, pa.py_buffer(line_indices.astype(np.int64))],
    )
    return pa.concat_tables(tables).take(taken)


def _rows_files(index: CommittedIndex, shards: Iterable[int]) -> dict[int, FileEntry]:
    return CommittedFiles(index, ROWS_FILE).files(shards)


def failures_by_reason(table: pa.Table) -> dict[str, int]:
    """Return the number of failed rows in `table` for each reason, sorted by reason."""
    reasons = table.filter(pc.equal(table["status"], FAILED))["reason"]
    counts = {
        str(item["values"]): int(item["counts"])
        for item in pc.value_counts(reasons).to_pylist()
    }
    return dict(sorted(counts.items()))
