"""A selection of rows of an index. The memory of a selection depends only on the
number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from storage_formats.arrays import Ints
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import Tombstones


@dataclass(frozen=True)
class Selection:
    """All rows of some shards except `left_out`, in row order. The rank of a row is its
    position in the selection.

    Attributes:
        shards: int64 [n], numbers of the shards, ascending.
        ranks: int64 [n + 1], number of selected rows before each shard, followed by the
            number of all selected rows.
    """

    spec: IndexSpec
    left_out: Tombstones
    shards: Ints
    ranks: Ints

    @classmethod
    def of(
        cls,
        index: CommittedIndex,
        left_out: Tombstones | None = None,
        shards: Iterable[int] | None = None,
    ) -> Selection:
        """Select the rows of `shards` except `left_out`. By default, select all
        rows that are not deleted.
        """
        spec = index.spec
        left_out = index.deleted if left_out is None else left_out
        shards = np.fromiter(
            spec.shard_numbers() if shards is None else shards, dtype=np.int64
        )
        counts = np.fromiter(
            (len(spec.shard_rows(shard)) for shard in shards.tolist()), dtype=np.int64
        )
        _, lines, left_out_lines = np.intersect1d(
            shards, left_out.shards, return_indices=True
        )
        counts[lines] -= np.bitwise_count(left_out.bits[left_out_lines]).sum(
            axis=1, dtype=np.int64
        )
        return cls(spec, left_out, shards, np.concatenate([[0], np.cumsum(counts)]))

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return int(self.ranks[-1])

    def row_ids(self, ranks: range) -> Ints:
        """Return the row ids of the rows with the given `ranks`, int64
        [len(ranks)], ascending.
        """
        first, last = (
            np.searchsorted(self.ranks, [ranks.start, ranks.stop - 1], side="right") - 1
        )
        row_ids = np.concatenate(
            [self._of_shard(int(shard)) for shard in self.shards[first : last + 1]]
        )
        start = ranks.start - int(self.ranks[first])
        return row_ids[start : start + len(ranks)]

    def by_shard(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield (row ids, ranks) for each shard: int64 [k] each, for the k selected
        rows of the shard.
        """
        for shard, first, stop in zip(
            self.shards.tolist(), self.ranks[:-1], self.ranks[1:], strict=True
        ):
            yield self._of_shard(shard), np.arange(first, stop)

    def ranks_of(self, row_ids: Ints | list[int]) -> Ints:
        """Return the rank of each of `row_ids`, int64 [k]. The rank is -1 if the
        row is not selected.
        """
        requested = np.asarray(row_ids, dtype=np.int64)
        ranks = np.full(len(requested), -1, dtype=np.int64)
        shard_of_row = requested // self.spec.shard_size
        for shard in np.intersect1d(shard_of_row, self.shards).tolist():
            selected = self._of_shard(shard)
            of_shard = np.flatnonzero(shard_of_row == shard)
            positions = np.searchsorted(selected, requested[of_shard])
            listed = positions < len(selected)
            listed[listed] = selected[positions[listed]] == requested[of_shard][listed]
            ranks[of_shard[listed]] = (
                self.ranks[np.searchsorted(self.shards, shard)] + positions[listed]
            )
        return ranks

    def new_ids(self, first_row: int, row_ids: Ints) -> Ints:
        """Return the ids of `row_ids`, int64 [k], if the selected rows are numbered
        from `first_row` on; -1 if a row is not selected.
        """
        ranks = self.ranks_of(row_ids)
        return np.where(ranks < 0, -1, first_row + ranks)

    def _of_shard(self, shard: int) -> Ints:
        row_ids = np.array(self.spec.shard_rows(shard), dtype=np.int64)
        return row_ids[~self.left_out.contain(row_ids)]
