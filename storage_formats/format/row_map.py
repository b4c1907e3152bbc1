"""Row maps. A row map is a file with the old and the new row id of each row that a
compaction copied (SPEC.md section 12.1).
"""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage_formats.arrays import Ints
from storage_formats.format.layout import ROW_MAP_FILE, Layout
from storage_formats.format.manifest import CommittedIndex, RowMap
from storage_formats.format.parquet import ParquetRowGroups, iter_batches, open_parquet
from storage_formats.format.shard_table import (
    FileEntry,
    committed_content,
    write_named_file,
)
from storage_formats.format.tombstones import RowIds, as_indices, rows_in_use

ROW_MAP_SCHEMA = pa.schema(
    [
        pa.field("old_row_id", pa.int64(), nullable=False),
        pa.field("new_row_id", pa.int64(), nullable=False),
    ]
)
_GROUP_LINES = 65_536


def write_row_map(layout: Layout, old: Ints, new: Ints) -> FileEntry:
    """Write a row map, and return its file entry.

    Args:
        old: int64 [k], row ids before the compaction, ascending.
        new: int64 [k], row ids of the same rows after the compaction, ascending.
    """
    table = pa.table([old, new], schema=ROW_MAP_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=_GROUP_LINES, compression="zstd")
    return write_named_file(layout, ROW_MAP_FILE, sink.getvalue().to_pybytes())


def translate_row_ids(index: CommittedIndex, row_ids: RowIds) -> Ints:
    """Return the current row id of each of `row_ids`, int64 [k], or -1 if the index has
    no such row. See `storage_formats.TokenStore.translate`.
    """
    ids = as_indices(row_ids, "row_ids").astype(np.int64)
    for row_map in index.manifest.row_maps:
        ids = _translate(index, row_map, ids)
    return np.where((ids >= 0) & rows_in_use(ids, index.spec), ids, -1)


def check_row_map(index: CommittedIndex, row_map: RowMap) -> None:
    """Read the whole file of a row map. Raise CorruptIndexError if the file is missing
    or damaged.
    """
    index.fetch([row_map.file])
    with committed_content(index.root, row_map.file, "row map") as data:
        # This raises an error if the file declares too many lines for its length.
        ParquetRowGroups(io.BytesIO(data), len(data), "old_row_id")
        with open_parquet(pa.py_buffer(data)) as file:
            for batch in iter_batches(file, _GROUP_LINES, ROW_MAP_SCHEMA.names):
                _columns(index, row_map, pa.Table.from_batches([batch]))


def _translate(index: CommittedIndex, row_map: RowMap, ids: Ints) -> Ints:
    """Translate `ids`, int64 [k], with one row map. The result is -1 if the compaction
    left the row out. An id of -1 remains -1.
    """
    renumbered = (ids >= 0) & (ids < row_map.first_row)
    result = ids.copy() if row_map.is_partial else np.where(renumbered, -1, ids)
    index.fetch([row_map.file])
    with committed_content(index.root, row_map.file, "row map") as data:
        file = io.BytesIO(data)
        for group in ParquetRowGroups(file, len(data), "old_row_id").read(
            file, ids[renumbered].tolist()
        ):
            old, new = _columns(index, row_map, group)
            if len(old):
                # `old` is ascending, so a binary search finds the line of each row id
                # that `old` lists. For the others, it returns an arbitrary line, and
                # `listed` is False.
                lines = np.minimum(np.searchsorted(old, ids), len(old) - 1)
                listed = renumbered & (old[lines] == ids)
                result[listed] = new[lines[listed]]
    return result


def _columns(
    index: CommittedIndex, row_map: RowMap, lines: pa.Table
) -> tuple[Ints, Ints]:
    """Return the old and the new row ids, int64 [k] each, of the k `lines`, which are a
    part of a row map.

    Raises:
        ValueError, pyarrow.ArrowException: the lines are damaged.
    """
    columns = lines.select(ROW_MAP_SCHEMA.names).cast(ROW_MAP_SCHEMA).columns
    old, new = (column.to_numpy() for column in columns)
    ascending = (np.diff(old) > 0).all() and (np.diff(new) > 0).all()
    if len(old) and not (
        ascending
        and old[-1] < row_map.first_row <= new[0]
        # Later compactions may have left out the last rows, so the new row ids may be
        # beyond the current end of the index. No shard from `next_shard` on was used.
        and new[-1] < index.manifest.snapshot.next_shard * index.spec.shard_size
    ):
        raise ValueError("the row ids do not ascend, or are out of range")
    return old, new
