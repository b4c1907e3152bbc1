"""Row maps: files with the old and new row ids of the rows that a compaction kept
(SPEC.md section 12.1).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from storage_formats.errors import cannot_read
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex, RowMap
from storage_formats.format.parquet import ParquetRowGroups, iter_batches, open_parquet
from storage_formats.format.shard_table import (
    FileEntry,
    check_content,
    write_named_file,
)
from storage_formats.format.tombstones import RowIds, check_row_ids, rows_in_use

Ints = NDArray[np.int64]

ROW_MAP_SCHEMA = pa.schema(
    [
        pa.field("old_row_id", pa.int64(), nullable=False),
        pa.field("new_row_id", pa.int64(), nullable=False),
    ]
)
_GROUP_LINES = 65_536


def write_row_map(layout: Layout, parts: Iterable[tuple[Ints, Ints]]) -> FileEntry:
    """Write a row map and return the file entry.

    Args:
        parts: pairs (old row ids, new row ids), int64 [k] each. The row ids ascend
            within a part and from part to part.
    """
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, ROW_MAP_SCHEMA, compression="zstd") as writer:
        for old, new in parts:
            writer.write_table(
                pa.table([old, new], schema=ROW_MAP_SCHEMA), row_group_size=_GROUP_LINES
            )
    return write_named_file(layout, layout.row_map, sink.getvalue().to_pybytes())


def translate_row_ids(index: CommittedIndex, row_ids: RowIds) -> Ints:
    """Return the current row id of each of `row_ids`, int64 [k]. See
    `storage_formats.TokenStore.translate`.
    """
    ids = check_row_ids(row_ids, index.manifest.spec.rows)
    for row_map in index.manifest.row_maps:
        ids = _translate(index, row_map, ids)
    return np.where(rows_in_use(ids, index.manifest.spec), ids, -1)


def check_row_map(index: CommittedIndex, row_map: RowMap) -> None:
    """Raise CorruptIndexError if a row map is missing or damaged. Reads the whole
    file.
    """
    with _opened(index, row_map) as data:
        # checks the number of lines that the file claims
        ParquetRowGroups(io.BytesIO(data), len(data), "old_row_id")
        with open_parquet(pa.py_buffer(data)) as file:
            for batch in iter_batches(file, _GROUP_LINES, ROW_MAP_SCHEMA.names):
                _columns(index, row_map, pa.Table.from_batches([batch]))


def _translate(index: CommittedIndex, row_map: RowMap, ids: Ints) -> Ints:
    """Translate `ids` with one row map. An id of -1 remains -1."""
    renumbered = (ids >= 0) & (ids < row_map.first_row)
    result = ids.copy() if row_map.is_partial else np.where(renumbered, -1, ids)
    with _opened(index, row_map) as data:
        file = io.BytesIO(data)
        for group in ParquetRowGroups(file, len(data), "old_row_id").read(
            file, ids[renumbered].tolist()
        ):
            old, new = _columns(index, row_map, group)
            if len(old):
                lines = np.minimum(np.searchsorted(old, ids), len(old) - 1)
                listed = renumbered & (old[lines] == ids)
                result[listed] = new[lines[listed]]
    return result


@contextlib.contextmanager
def _opened(index: CommittedIndex, row_map: RowMap) -> Iterator[bytes]:
    """Yield the contents of a row map. Errors inside the `with` block become a
    CorruptIndexError.
    """
    path = index.root / row_map.file.path
    try:
        index.fetch([row_map.file])
        data = read_index_file(index.root, path, max_bytes=row_map.file.bytes)
        check_content(path, row_map.file, data)
        yield data
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise cannot_read(
            f"the row map {path}", error, "restore the file from a backup"
        ) from error


def _columns(
    index: CommittedIndex, row_map: RowMap, lines: pa.Table
) -> tuple[Ints, Ints]:
    """Return the old and the new row ids of `lines`, int64 [k] each."""
    columns = lines.select(ROW_MAP_SCHEMA.names).cast(ROW_MAP_SCHEMA).columns
    old, new = (column.to_numpy() for column in columns)
    ascending = (np.diff(old) > 0).all() and (np.diff(new) > 0).all()
    if len(old) and not (
        ascending
        and old[-1] < row_map.first_row <= new[0]
        and new[-1] < index.manifest.spec.rows
    ):
        raise ValueError("the row ids do not ascend, or are out of range")
    return old, new
