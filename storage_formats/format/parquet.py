"""Reading Parquet files, always in the calling thread.

Threads that pyarrow starts for a read can outlive it, and then abort the interpreter when it exits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MAX_ROWS_PER_BYTE = 8
_MAX_EXPANSION = 1000
_MAX_TEXT_EXPANSION = 100
_MIN_TEXT_BYTES = 64 << 20


def open_parquet(source: str | Path | pa.Buffer) -> pq.ParquetFile:
    """Open a Parquet file. It is a context manager that closes itself.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be read or is not a Parquet file.
    """
    return pq.ParquetFile(pa.BufferReader(source) if isinstance(source, pa.Buffer) else source, pre_buffer=False)


def iter_batches(file: pq.ParquetFile, rows: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield `columns` of an open file in batches of at most `rows` rows.

    Raises:
        OSError, pyarrow.ArrowException: the file is damaged.
    """
    yield from file.iter_batches(rows, columns=columns, use_threads=False)


def read_table(data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The table in `data`, a whole Parquet file whose rows are distinct.

    Args:
        data: contents of the file.
        columns: names of the columns to read, in this order; None reads all.

    Raises:
        OSError, ValueError, pyarrow.ArrowException: `data` is damaged, lacks a column, or claims sizes that a table
            of distinct rows cannot have in so few bytes.
    """
    with open_parquet(pa.py_buffer(data)) as file:
        _check_size(file.metadata, len(data))
        schema = file.schema_arrow
    names = schema.names if columns is None else columns
    if missing := sorted(set(names) - set(schema.names)):
        raise ValueError(f"it has no column {missing[0]!r}")
    # Text is read as a dictionary, so that one long value of many rows is in memory once until its size is checked.
    texts = [field.name for field in schema if field.type in (pa.string(), pa.binary())]
    with pq.ParquetFile(pa.py_buffer(data), read_dictionary=texts, pre_buffer=False) as file:
        table = file.read(columns=names, use_threads=False).select(names)
    _check_texts(table, len(data))
    return table.cast(pa.schema([schema.field(name) for name in names]))


def _check_texts(table: pa.Table, length: int) -> None:
    """ValueError if the values of dictionary columns, written out, would take far more memory than the file."""
    chunks = [chunk for column in table.columns for chunk in column.chunks if pa.types.is_dictionary(chunk.type)]
    lengths = [pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in chunks]
    total = sum(pc.sum(values).as_py() or 0 for values in lengths)
    if total > max(_MIN_TEXT_BYTES, _MAX_TEXT_EXPANSION * length):
        raise ValueError(f"it holds {total} bytes of text, which do not fit its length of {length} bytes")


def _check_size(metadata: pq.FileMetaData, length: int) -> None:
    """Raise ValueError if the table would take far more memory than the file, as a few repeated values can."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
    decoded = sum(group.column(index).total_uncompressed_size for group in groups for index in range(group.num_columns))
    if rows > _MAX_ROWS_PER_BYTE * length or decoded > _MAX_EXPANSION * length:
        raise ValueError(f"it claims {rows} rows of {decoded} bytes, which do not fit its length of {length} bytes")
