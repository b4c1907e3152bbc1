"""Copying of rows into new shards, with new row ids (SPEC.md section 12.1). No block is decoded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, EdjeError
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    FAILED,
    INDEXED,
    failures_by_reason,
    read_index_rows,
    read_shard_rows,
    write_rows,
)
from storage_formats.format.selection import Selection
from storage_formats.format.shard_table import FileEntry, check_content
from storage_formats.format.source_columns import SourceColumn
from storage_formats.token_store import TokenStore
from storage_formats.writing.shard_writer import open_tokens, stage_tokens
from storage_formats.writing.staging import StagedFiles

_PIECE_BYTES = 8 << 20
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LostOriginal:
    """Why a copied duplicate becomes a failed row: its original is not copied. See `RowEntry.fail`."""

    reason: str
    detail: str


ORIGINAL_DELETED = LostOriginal("original-deleted", "the original of this duplicate was deleted")


class CopyInterrupted(EdjeError):
    """The caller stopped the copy of a shard. The unfinished files of this shard were removed."""


@dataclass(frozen=True)
class RowCopy:
    """The plan of a copy of rows. The copied rows become the last segment of the target.

    Attributes:
        source: the index to copy from.
        selection: the rows to copy.
        target: directory of the index to write to. It may be the directory of `source`.
        spec: shape of the target. The last segment has one row for each selected row.
        plan: fingerprint of the plan, stored in the receipts.
    """

    source: CommittedIndex
    selection: Selection
    target: Path
    spec: IndexSpec
    plan: str

    @classmethod
    def plan_segment(
        cls, source: CommittedIndex, selection: Selection, target: Path, first_row: int, plan: str
    ) -> RowCopy:
        """Plan a copy in which the copied rows become the only segment of the target, with row ids from `first_row`."""
        segment = Segment(first_row, len(selection))
        segments = (segment,) if first_row else ()
        spec = replace(source.manifest.spec, rows=segment.stop, segments=segments)
        return cls(source, selection, target, spec, plan)

    @property
    def segment(self) -> Segment:
        return self.spec.used_segments[-1]

    @property
    def shards(self) -> range:
        """The numbers of the shards to write."""
        return self.spec.segment_shards(self.segment)


class RowCopier:
    """Writes the shards of a `RowCopy`. Also a context manager that closes the files.

    The copier compares all data that it reads with the stored checksums.
    """

    def __init__(self, copy: RowCopy) -> None:
        self._copy = copy
        self._layout = Layout(copy.target)
        self._stores = {name: TokenStore(copy.source, name) for name in copy.spec.precisions}
        self._embedding_files = CommittedFiles(copy.source, Layout(copy.source.root).embedding_shard)

    def copy_shard(
        self,
        shard: int,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> ShardReceipt:
        """Write and commit the files of one shard, and write the receipt.

        Args:
            shard: shard number in the target.
            on_progress: called with the number of rows copied so far.
            should_stop: called between pieces; True stops the copy.

        Raises:
            CorruptIndexError: a record or a file of the source is damaged.
            CopyInterrupted: `should_stop` returned True.
            OSError: a file of the target cannot be written.
        """
        new_ids = self._copy.spec.shard_rows(shard)
        first = self._copy.segment.first_row
        old_ids = self._copy.selection.row_ids(range(new_ids.start - first, new_ids.stop - first))
        rows = self._rows(old_ids, new_ids)
        indexed = np.flatnonzero(np.array([status == INDEXED for status in rows["status"].to_pylist()]))
        staged = StagedFiles(self._layout, shard)
        with contextlib.ExitStack() as stack:
            stack.callback(staged.remove)
            for number, name in enumerate(self._stores):
                file = open_tokens(staged, self._copy.spec, shard, name)
                stack.callback(file.close)
                for piece in _pieces(indexed, file.codec.record_bytes):
                    if should_stop():
                        raise CopyInterrupted(
                            f"the copy of shard {shard} was stopped; run the same command again to resume"
                        )
                    file.put(piece, self._stores[name].fetch_records(old_ids[piece]))
                on_progress(len(new_ids) * (number + 1) // len(self._stores))
                stage_tokens(staged, self._layout, shard, name, file)
            embeddings = self._embeddings(old_ids, indexed)
            staged.add_bytes("embeddings", self._layout.embedding_shard(shard), embeddings.tobytes())
            write_rows(staged.path("rows"), rows)
            staged.add("rows", self._layout.rows_file(shard))
            receipt = receipt_of_rows(shard, self._copy.plan, rows, staged.commit())
            staged.commit_receipt(receipt)
        return receipt

    def close(self) -> None:
        """Close the token files of the source."""
        for store in self._stores.values():
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows(self, old_ids: Ints, new_ids: range) -> pa.Table:
        """Return the rows table of a new shard: the lines of `old_ids` with the row ids `new_ids`."""
        table = read_index_rows(self._copy.source, old_ids)
        originals = [-1 if original is None else original for original in table["duplicate_of"].to_pylist()]
        ranks = self._copy.selection.ranks_of(originals).tolist()
        first = self._copy.segment.first_row
        new_originals = [-1 if rank < 0 else first + rank for rank in ranks]
        return with_row_ids(table, new_ids, new_originals, ORIGINAL_DELETED)

    def _embeddings(self, old_ids: Ints, indexed: Ints) -> NDArray[np.float32]:
        """Return the embeddings of a new shard, float32 [shard_size, embed_dim]. Positions not in `indexed` are NaN."""
        spec = self._copy.spec
        values = np.full((spec.shard_size, spec.embed_dim), np.nan, dtype="<f4")
        shards, positions = np.divmod(old_ids[indexed], spec.shard_size)
        for shard, committed in self._embedding_files.files(np.unique(shards).tolist()).items():
            path = self._copy.source.root / committed.path
            data = read_index_file(self._copy.source.root, path, max_bytes=committed.bytes)
            check_content(path, committed, data)
            if len(data) != values.nbytes:
                raise CorruptIndexError(
                    f"{path} has {len(data)} bytes instead of {values.nbytes}; run 'edje-index verify'"
                )
            stored = np.frombuffer(data, dtype="<f4").reshape(values.shape)
            of_shard = shards == shard
            values[indexed[of_shard]] = stored[positions[of_shard]]
        return values


def with_row_ids(table: pa.Table, row_ids: range, originals: Sequence[int], lost: LostOriginal) -> pa.Table:
    """Return k rows with new row ids.

    Args:
        table: rows table of the k rows.
        row_ids: the k new row ids.
        originals: for each row, the new row id of its original. Values of rows that are no duplicates are ignored. A
            duplicate with the value -1 becomes a failed row.
        lost: reason of these failed rows.
    """
    lines = table.select(["status", "reason", "detail", "duplicate_of"]).to_pylist()
    for line, original in zip(lines, originals, strict=True):
        if line["status"] == DUPLICATE and original < 0:
            line |= {"status": FAILED, "reason": lost.reason, "detail": lost.detail, "duplicate_of": None}
        elif line["status"] == DUPLICATE:
            line["duplicate_of"] = original
    columns = {name: [line[name] for line in lines] for name in ("status", "reason", "detail", "duplicate_of")}
    return with_columns(table, {"row_id": list(row_ids), **columns})


def receipt_of_rows(shard: int, plan: str, rows: pa.Table, files: tuple[FileEntry, ...]) -> ShardReceipt:
    """Return the receipt of a copied shard with the rows table `rows`."""
    statuses = rows["status"].to_pylist()
    counts = statuses.count(INDEXED), statuses.count(DUPLICATE), failures_by_reason(rows)
    return ShardReceipt(shard, plan, len(rows), *counts, files, seconds={})


def with_columns(table: pa.Table, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return `table` with new values in some columns. `columns` maps column names to new values."""
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        table = table.set_column(index, field, pa.array(values, field.type))
    return table


def count_values(layout: Layout, shards: Iterable[int], columns: Sequence[SourceColumn]) -> tuple[SourceColumn, ...]:
    """Count the values of each source column in `shards`. Return `columns` with these numbers."""
    if not columns:
        return ()
    counts = Counter[str]()
    for shard in shards:
        table = read_shard_rows(layout, shard, [column.name for column in columns], source_columns=columns)
        counts.update({name: len(table) - table[name].null_count for name in table.column_names})
    return tuple(replace(column, values=counts[column.name]) for column in columns)


def _pieces(positions: Ints, record_bytes: int) -> list[Ints]:
    """Split `positions` so that the records of each piece take at most 8 MiB."""
    step = max(1, _PIECE_BYTES // record_bytes)
    return [positions[start : start + step] for start in range(0, len(positions), step)]
