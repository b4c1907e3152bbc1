"""Reading of Parquet files that may be damaged, and writing of files that pass the
checks of `read_table`.

All reads run in the calling thread only. Threads of pyarrow can continue after a read,
and then abort the interpreter at exit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage_formats.arrays import Ints

# A short damaged file can declare a table that does not fit in memory. A table is
# therefore refused if it has too many rows, or takes too many bytes in memory, per byte
# of the file. Up to `_SMALL_VALUES` rows and `_SMALL_BYTES` bytes are always accepted.
_SMALL_VALUES = 1 << 20
_SMALL_BYTES = 64 << 20
_MAX_ROWS_PER_BYTE = 8
_MAX_EXPANSION = 1000
_MAX_TEXT_EXPANSION = 100

# Tables that are written here take at least this number of bytes per value in memory.
_MIN_VALUE_BYTES = 4


def table_bytes(table: pa.Table) -> bytes:
    """Return `table` as the contents of a Parquet file that `read_table` accepts. The
    file is compressed with zstd, unless it would then be so short that `read_table`
    would take it for damaged.
    """
    data = parquet_bytes(table, compression="zstd")
    # A table with fewer bytes has so few values that `read_table` always accepts it.
    if table.nbytes > _MIN_VALUE_BYTES * _SMALL_VALUES:
        try:
            read_table(data)
        except ValueError:
            return parquet_bytes(table, compression="none", use_dictionary=False)
    return data


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    """Return `table` as the contents of a Parquet file. `options` are those of
    `pyarrow.parquet.write_table`.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def open_parquet(source: Any, *, buffer_size: int = 0) -> pq.ParquetFile:
    """Open a Parquet file, a path or an open file. The returned object is a context
    manager that closes the file.

    Args:
        buffer_size: number of bytes of a column that are read at once. 0 reads the
            whole column of a row group at once.

    Raises:
        OSError, pyarrow.ArrowException: the file cannot be read or is not a Parquet
            file.
    """
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=buffer_size)


def iter_batches(
    file: pq.ParquetFile,
    rows: int,
    columns: list[str],
    row_groups: list[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield `columns` of an open file in batches of at most `rows` rows. `row_groups`
    are the numbers of the row groups to read; None reads all.

    Raises:
        OSError, pyarrow.ArrowException: the file is damaged.
    """
    yield from file.iter_batches(
        rows, row_groups=row_groups, columns=columns, use_threads=False
    )


def read_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table from the contents of a Parquet file.

    Args:
        data: contents of the file.
        columns: names of the columns to read. Columns that the file lacks are left out.
            None reads all columns.

    Raises:
        OSError, ValueError, pyarrow.ArrowException: `data` is damaged, or the table
            would be too large for the length of `data`. An undamaged file of distinct
            rows is never compressed so well.
    """
    file = pa.BufferReader(data)
    groups = ParquetRowGroups(file, len(data))
    tables = groups.read(file, None, columns)
    return pa.concat_tables([groups.fields(columns).empty_table(), *tables])


class ParquetRowGroups:
    """Reads only the row groups of a Parquet file that can contain given values in an
    integer column.

    Args:
        file: the open file, at position 0.
        length: length of the file in bytes.
        column: name of the integer column; None reads all row groups. Row groups
            without statistics for this column are always read.

    Raises:
        ValueError: there is no integer column of this name, or the file declares a
            table that is too large for its length.
        OSError, pyarrow.ArrowException: the file is damaged, or is not a Parquet file.
    """

    def __init__(self, file: BinaryIO, length: int, column: str | None = None) -> None:
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            self._metadata = opened.metadata
            self.schema = opened.schema_arrow
        _check_size(self._metadata, length)
        self._length = length
        self._column = column
        if column is None:
            return
        index = self.schema.get_field_index(column)
        if index < 0 or not pa.types.is_integer(self.schema.field(index).type):
            raise ValueError(f"the Parquet file has no integer column {column!r}")
        groups = [
            self._metadata.row_group(group).column(index)
            for group in range(self._metadata.num_row_groups)
        ]
        limits = np.iinfo(np.int64)
        spans = [
            (
                (group.statistics.min, group.statistics.max)
                if group.statistics is not None and group.statistics.has_min_max
                else (limits.min, limits.max)
            )
            for group in groups
        ]
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 2)

    def fields(self, columns: Sequence[str] | None) -> pa.Schema:
        """Return the schema of the columns `columns`, in the order of the file. None
        returns that of all columns.
        """
        fields = (
            field for field in self.schema if columns is None or field.name in columns
        )
        return pa.schema(fields)

    def read(
        self,
        file: BinaryIO,
        values: Sequence[int] | Ints | None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """Yield each row group of `file` that can contain one of `values` in the
        integer column.

        Args:
            values: integers in any order. None reads all row groups.
            columns: names of the columns to read. Columns that the file lacks are left
                out. None reads all columns.

        Raises:
            OSError, ValueError, pyarrow.ArrowException: the file is damaged.
        """
        groups = list(range(self._metadata.num_row_groups))
        if values is not None:
            # `after_min` is the number of values below the minimum of each row group,
            # and `after_max` the number of values up to and including its maximum. If
            # `after_max` is larger, the row group can contain a value, and is read.
            ascending = np.sort(np.asarray(values, dtype=np.int64))
            after_min = np.searchsorted(ascending, self._spans[:, 0])
            after_max = np.searchsorted(ascending, self._spans[:, 1], side="right")
            groups = np.flatnonzero(after_max > after_min).tolist()
        schema = self.fields(columns)
        opened = pq.ParquetFile(
            file,
            metadata=self._metadata,
            read_dictionary=_texts(self._metadata),
            pre_buffer=False,
            page_checksum_verification=True,
        )
        text_bytes = 0
        for group in groups:
            table = opened.read_row_group(group, schema.names, use_threads=False)
            # A reader without a key column keeps the row groups in memory.
            text_bytes = _text_bytes(table) + (self._column is None) * text_bytes
            if text_bytes > max(_SMALL_BYTES, _MAX_TEXT_EXPANSION * self._length):
                raise ValueError(
                    f"the Parquet file is damaged: the texts would take {text_bytes}"
                    f" bytes in memory, but the file has only {self._length} bytes"
                )
            yield table.select(schema.names).cast(schema)


def _texts(metadata: pq.FileMetaData) -> list[str]:
    """Return the paths of the columns that hold texts. Such columns are read as
    dictionary arrays, in which a text that many rows share is in memory only once.
    Their size is then checked before the texts are repeated.
    """
    # Each access to `metadata.schema` makes a new object.
    schema = metadata.schema
    leaves = [schema.column(index) for index in range(len(schema))]
    return [
        leaf.path
        for leaf in leaves
        if leaf.logical_type.type in ("STRING", "NONE")
        and leaf.physical_type == "BYTE_ARRAY"
    ]


def _text_bytes(table: pa.Table) -> int:
    """Return the number of bytes that the texts of `table` take if they are repeated
    for each row.
    """
    values = (
        pc.list_flatten(column) if pa.types.is_list(column.type) else column
        for column in table.columns
    )
    chunks = [
        chunk
        for column in values
        for chunk in column.chunks
        if pa.types.is_dictionary(chunk.type)
    ]
    lengths = [
        pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in chunks
    ]
    return sum(pc.sum(each).as_py() or 0 for each in lengths)


def _check_size(metadata: pq.FileMetaData, length: int) -> None:
    """Raise ValueError if the table that `metadata` declares would take far more memory
    than the file, which has `length` bytes.
    """
    # A short Parquet file can declare a huge table in which a few values are repeated.
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [
        group.column(index) for group in groups for index in range(group.num_columns)
    ]
    decoded = sum(column.total_uncompressed_size for column in columns)
    rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
    values = max((column.num_values for column in columns), default=0)
    most_values = max(_SMALL_VALUES, _MAX_ROWS_PER_BYTE * length)
    most_bytes = max(_SMALL_BYTES, _MAX_EXPANSION * length)
    if max(rows, values) > most_values or decoded > most_bytes:
        raise ValueError(
            f"the Parquet file is damaged: it declares {rows} rows with {decoded} bytes"
            f" of values, but a file of {length} bytes cannot contain that many"
        )
