"""Copies of rows: compactions, merges, copies of a part of an index, and erasures.
Records are copied without decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.arrays import Ints
from storage_formats.errors import TaskInterrupted
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    FAILED,
    INDEXED,
    RowEntry,
    read_index_rows,
    rows_table,
    stored_schema,
)
from storage_formats.format.tombstones import Tombstones
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore
from storage_formats.writing.shard_writer import ShardWriter

_PIECE_BYTES = 8 << 20
ERASED = "erased"
"""The reason of the failed rows whose data an erasure has removed."""
_LOST_ORIGINAL = {
    "status": FAILED,
    "reason": "original-deleted",
    "detail": "the original of this duplicate was deleted or left out",
    "duplicate_of": None,
}
Stop = Callable[[], bool]


@dataclass
class RowCopier:
    """Copies rows of an index to new shards, and gives them new row ids. All data that
    is read is compared with its checksums.

    Attributes:
        source: index to read.
        target: place of the index to write.
        spec: shape of the index to write.
        renumber: takes row ids of the source, and returns their row ids in the target,
            or -1 for rows that are not copied.
        erased: rows that get neither data nor a name in the target.
    """

    source: CommittedIndex
    target: Place
    spec: IndexSpec
    renumber: Callable[[Ints], Ints]
    erased: Tombstones | None = None

    def __post_init__(self) -> None:
        self._stores = {
            name: TokenStore(self.source, name) for name in self.spec.precisions
        }

    def copy(
        self,
        shard: int,
        row_ids: Ints,
        plan: str,
        should_stop: Stop,
    ) -> ShardReceipt:
        """Write and commit the files of one shard of the target. Return the receipt,
        which is also written.

        Args:
            shard: number of the shard in the target.
            row_ids: int64 [k], row ids that the k rows of the shard have in the source,
                in the order of their new row ids.
            plan: fingerprint of the copy, which is stored in the receipt.
            should_stop: called before each piece of the tokens. True stops the copy.

        Raises:
            TaskInterrupted: `should_stop` returned True. The unfinished files were
                removed.
        """
        columns = stored_schema(self.source.manifest.columns).names
        table = read_index_rows(self.source, row_ids, columns)
        originals = self.renumber(table["duplicate_of"].fill_null(-1).to_numpy())
        rows = with_row_ids(table, self.spec.shard_rows(shard), originals)
        if self.erased is not None:
            rows = without_rows(rows, self.erased)
        indexed = np.flatnonzero(rows["status"].to_numpy() == INDEXED)
        with ShardWriter(
            self.target, self.spec, shard, erases=self.erased is not None
        ) as writer:
            for name, file in writer.tokens.items():
                store = self._stores[name]
                step = max(1, _PIECE_BYTES // store.record_bytes)
                for piece in np.split(indexed, range(step, len(indexed), step)):
                    if should_stop():
                        raise TaskInterrupted
                    file.put(piece, store.fetch_records(row_ids[piece]))
            writer.embeddings[indexed] = read_embeddings(
                self.source, row_ids[indexed], compares_all=True
            )
            return writer.commit(rows, plan)


def with_row_ids(table: pa.Table, row_ids: range, originals: Ints) -> pa.Table:
    """Return `table`, k rows of a rows table, with new row ids.

    Args:
        row_ids: the k new row ids.
        originals: for each row, the new row id of the row that it duplicates, or -1 if
            that row was not copied. A duplicate with -1 becomes a failed row with the
            reason "original-deleted". Values for rows of another status are ignored.
    """
    is_duplicate = pc.equal(table["status"], DUPLICATE)
    is_lost = pc.and_(is_duplicate, pc.less(originals, 0))
    columns = {name: table[name] for name in table.column_names}
    columns["row_id"] = pa.array(row_ids)
    columns["duplicate_of"] = pc.if_else(is_duplicate, originals, None)
    for name, value in _LOST_ORIGINAL.items():
        lost = pa.scalar(value, table.schema.field(name).type)
        columns[name] = pc.if_else(is_lost, lost, columns[name])
    return pa.table(columns, table.schema)


def without_rows(table: pa.Table, erased: Tombstones) -> pa.Table:
    """Return a rows table in which each of the rows `erased` is a failed row without a
    name and without values.
    """
    row_ids = table["row_id"].to_numpy()
    is_erased = erased.contain(row_ids)
    blank = rows_table(
        [
            RowEntry(row_id, "", status=FAILED, reason=ERASED)
            for row_id in row_ids[is_erased].tolist()
        ]
    )
    kept = table.filter(pa.array(~is_erased))
    joined = pa.concat_tables([kept, blank], promote_options="default")
    return joined.sort_by("row_id")
