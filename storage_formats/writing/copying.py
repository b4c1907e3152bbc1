"""Copies of rows and of whole shards, for compactions, merges and copies of a part.
No block is decoded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.atomic import naming
from storage_formats.errors import CorruptIndexError, TaskInterrupted, cannot_read
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import EMBEDDING_FILE, IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    FAILED,
    INDEXED,
    read_index_rows,
    read_shard_rows,
)
from storage_formats.format.selection import Selection
from storage_formats.format.shard_table import EXCHANGED, FileEntry
from storage_formats.format.source_columns import SourceColumn
from storage_formats.reading.embeddings import read_shard_embeddings
from storage_formats.shard_check import shard_paths
from storage_formats.token_store import TokenStore
from storage_formats.writing.staging import StagedFiles

PIECE_BYTES = 8 << 20
_LOST_ORIGINAL = {
    "status": FAILED,
    "reason": "original-deleted",
    "detail": "the original of this duplicate was deleted or left out",
    "duplicate_of": None,
}
Ints = NDArray[np.int64]
Stop = Callable[[], bool]


class RowCopier:
    """Writes selected rows to new shards, with new row ids. All data is compared with
    the stored checksums.

    Args:
        target: layout of the index to write to. It may be that of `source`.
        spec: shape of the target. Its last segment has one row for each selected row.
    """

    def __init__(
        self,
        source: CommittedIndex,
        selection: Selection,
        target: Layout,
        spec: IndexSpec,
    ) -> None:
        self._source = source
        self._selection = selection
        self._target = target
        self._spec = spec
        self._stores = {name: TokenStore(source, name) for name in spec.precisions}
        self._embedding_files = CommittedFiles(source, EMBEDDING_FILE)

    def close(self) -> None:
        """Close the token files of the source."""
        for store in self._stores.values():
            store.close()

    def copy_shard(self, shard: int, plan: str, should_stop: Stop) -> ShardReceipt:
        """Write and commit the files of one shard of the target, and write the receipt.

        Args:
            should_stop: called between pieces; True stops the copy.

        Raises:
            TaskInterrupted: `should_stop` returned True. The unfinished files were
                removed.
        """
        new_ids = self._spec.shard_rows(shard)
        first = self._spec.used_segments[-1].first_row
        old_ids = self._selection.row_ids(
            range(new_ids.start - first, new_ids.stop - first)
        )
        table = read_index_rows(self._source, old_ids)
        originals = table["duplicate_of"].fill_null(-1).to_pylist()
        ranks = self._selection.ranks_of(originals).tolist()
        rows = with_row_ids(
            table, new_ids, [-1 if rank < 0 else first + rank for rank in ranks]
        )
        indexed = np.flatnonzero(rows["status"].to_numpy() == INDEXED)
        staged = StagedFiles(self._target, shard)
        with contextlib.ExitStack() as stack:
            stack.callback(staged.remove)
            for name, store in self._stores.items():
                file = staged.open_tokens(self._spec, name)
                stack.callback(file.close)
                step = max(1, PIECE_BYTES // file.codec.record_bytes)
                for start in range(0, len(indexed), step):
                    if should_stop():
                        raise TaskInterrupted
                    piece = indexed[start : start + step]
                    file.put(piece, store.fetch_records(old_ids[piece]))
                staged.add_tokens(file)
            embeddings = self._embeddings(old_ids, indexed)
            staged.add_bytes(
                "embeddings", self._target.embedding_shard(shard), embeddings.tobytes()
            )
            return staged.commit_rows(rows, plan)

    def _embeddings(self, old_ids: Ints, indexed: Ints) -> NDArray[np.float32]:
        """Return the embeddings of a new shard, float32 [shard_size, embed_dim].
        Positions not in `indexed` are NaN.
        """
        values = np.full(
            (self._spec.shard_size, self._spec.embed_dim), np.nan, dtype="<f4"
        )
        source = self._source
        spec = source.manifest.spec
        shards, positions = np.divmod(old_ids[indexed], spec.shard_size)
        entries = self._embedding_files.files(np.unique(shards).tolist())
        source.fetch(entries.values())
        for shard, committed in entries.items():
            stored = read_shard_embeddings(Layout(source.root), spec, shard, committed)
            of_shard = shards == shard
            values[indexed[of_shard]] = stored[positions[of_shard]]
        return values


class ShardCopier:
    """Copies whole shards to another index, where every row id grows by `offset`.

    Args:
        offset: number to add to the row ids, a multiple of the shard size.
    """

    def __init__(self, source: CommittedIndex, offset: int, target: Layout) -> None:
        self._source = source
        self._offset = offset
        self._target = target
        self._entries = {file.path: file for _, file in source.shard_files()}

    def copy_shard(self, shard: int, plan: str) -> ShardReceipt:
        """Copy and commit the files of shard `shard` of the source, and write the
        receipt.
        """
        spec = self._source.manifest.spec
        source = Layout(self._source.root)
        moved = shard + self._offset // spec.shard_size
        staged = StagedFiles(self._target, moved)
        try:
            old_rows, *old_paths = shard_paths(source, spec, shard)
            _, *paths = shard_paths(self._target, spec, moved)
            for number, (old, new) in enumerate(zip(old_paths, paths, strict=True)):
                entry = self._entry(old)
                copy_file(source.root, entry, staged.path(str(number)))
                staged.add(
                    str(number), self._target.root / new, entry.bytes, entry.crc32c
                )
            table = read_shard_rows(
                source,
                shard,
                None,
                self._entry(old_rows),
                self._source.manifest.columns,
                self._source.edits,
            )
            originals = table["duplicate_of"].fill_null(-1).to_numpy() + self._offset
            rows = spec.shard_rows(shard)
            table = with_row_ids(
                table,
                range(rows.start + self._offset, rows.stop + self._offset),
                originals.tolist(),
            )
            return staged.commit_rows(table, plan)
        finally:
            staged.remove()

    def _entry(self, path: str) -> FileEntry:
        if path not in self._entries:
            root = self._source.root
            raise CorruptIndexError(
                f"the shard table of {root} does not list {path}", remedy="verify"
            )
        return self._entries[path]


def with_row_ids(table: pa.Table, row_ids: range, originals: Sequence[int]) -> pa.Table:
    """Return k rows with new row ids.

    Args:
        originals: for each row, the new row id of its original. Values of rows that are
            no duplicates are ignored. A duplicate with the value -1 becomes a failed
            row with the reason "original-deleted".
    """
    lines = table.select(["status", "reason", "detail", "duplicate_of"]).to_pylist()
    for line, row_id, original in zip(lines, row_ids, originals, strict=True):
        line["row_id"] = row_id
        if line["status"] == DUPLICATE and original < 0:
            line |= _LOST_ORIGINAL
        elif line["status"] == DUPLICATE:
            line["duplicate_of"] = original
    for name in ("row_id", *_LOST_ORIGINAL):
        position = table.schema.get_field_index(name)
        field = table.schema.field(position)
        values = pa.array([line[name] for line in lines], field.type)
        table = table.set_column(position, field, values)
    return table


def count_values(
    layout: Layout, shards: Iterable[int], columns: Sequence[SourceColumn]
) -> Counter[str]:
    """Return the number of values of each source column in `shards`."""
    counts = Counter[str]()
    for shard in shards if columns else ():
        table = read_shard_rows(
            layout, shard, [column.name for column in columns], source_columns=columns
        )
        counts.update(
            {name: len(table) - table[name].null_count for name in table.column_names}
        )
    return counts


def with_values(
    columns: Sequence[SourceColumn], counts: Mapping[str, int]
) -> tuple[SourceColumn, ...]:
    """Return `columns` with the numbers of values in `counts`."""
    return tuple(
        replace(column, values=counts.get(column.name, 0)) for column in columns
    )


def copy_file(root: Path, source: FileEntry, target: Path) -> None:
    """Copy a file of the index at `root` to the new file `target`, and compare the copy
    with the file entry `source`.

    The file system shares the disk blocks if it can (reflink).
    """
    path = root / source.path
    try:
        opened = open_index_file(root, path)
    except OSError as error:
        raise cannot_read(path, error) from error
    with opened, naming(target), open(target, "xb") as copy:
        length = os.fstat(opened.fileno()).st_size
        if length == source.bytes:
            _copy_in_kernel(opened.fileno(), copy.fileno(), length)
            # what the kernel has not copied
            shutil.copyfileobj(opened, copy)
    if crc32c_file(target) != (source.bytes, source.crc32c):
        raise CorruptIndexError(
            f"{path} is not the file that was committed: {EXCHANGED}"
        )


def _copy_in_kernel(source: int, target: int, length: int) -> None:
    """Copy up to `length` bytes between two file descriptors in the kernel, as many as
    it can. Both descriptors then stand behind these bytes.
    """
    # Linux. An error that is none of this call meets the ordinary copy again.
    with contextlib.suppress(AttributeError, OSError):
        while length and (count := os.copy_file_range(source, target, length)):
            length -= count
