"""The records of one request, and runs of neighbouring records."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.memory import Bytes, lend

Ints = NDArray[np.int64]
Part = slice | Ints
"""A selection of the records of a batch, as a slice or as ascending indices."""

# Number of records in a piece of a batch. A disk reads a piece in a few milliseconds,
# and several pieces are in flight at a time.
PIECE_RECORDS = 128
# maximum size of a run in bytes, unless the caller gives another
RUN_BYTES = 1 << 20


@dataclass(frozen=True)
class Batch:
    """Records to read, sorted by shard and position. Each record occurs once.

    Attributes:
        shards: int64 [n], shard number of each record, ascending.
        positions: int64 [n], position of each record in its shard, ascending within a
            shard.
        out_indices: int64 [n], index of each record in the output array.
    """

    shards: Ints
    positions: Ints
    out_indices: Ints

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, selection: Part | NDArray[np.bool_]) -> Batch:
        # If everything is selected, this object is returned, because it may have cached
        # its `shard_spans`.
        if isinstance(selection, slice) and selection == slice(0, len(self)):
            return self
        return Batch(
            self.shards[selection],
            self.positions[selection],
            self.out_indices[selection],
        )

    @functools.cached_property
    def shard_spans(self) -> list[tuple[int, int, int]]:
        """(shard, start, stop) for each shard of the batch. The records of the shard
        are the records [start, stop) of the batch.

        The batch must not be empty.
        """
        if self.shards[0] == self.shards[-1]:
            return [(int(self.shards[0]), 0, len(self))]
        edges = [0, *(np.flatnonzero(np.diff(self.shards)) + 1).tolist(), len(self)]
        return list(
            zip(self.shards[edges[:-1]].tolist(), edges, edges[1:], strict=False)
        )

    def per_record(self, values: Sequence[int]) -> Ints:
        """Return an array with one value per record, int64 [n]. `values` contains
        one value per shard of the batch.
        """
        counts = [stop - start for _, start, stop in self.shard_spans]
        return np.repeat(np.array(values, dtype=np.int64), counts)

    def pieces(self, length: int) -> list[slice]:
        """Return consecutive parts of `length` records; the last part may be
        shorter.
        """
        return [
            slice(start, min(start + length, len(self)))
            for start in range(0, len(self), length)
        ]

    def ranges(
        self, record_bytes: int, *, gap: int = 0, longest_bytes: int = RUN_BYTES
    ) -> tuple[list[tuple[int, int, memoryview]], Ints, Bytes]:
        """Lend a buffer for the records of the batch. The runs of the batch lie one
        after the other in the buffer. The other arguments are those of `runs`.

        Returns:
            (ranges, sources, buffer). `ranges` has (shard, byte offset, target) for
            each run: the bytes of the shard from the offset on belong into `target`, a
            part of the buffer. `sources`, int64 [n], is the memory address of each
            record of the batch. Without gaps, the records have the same order in the
            buffer as in the batch.
        """
        first, count = self.runs(record_bytes, gap=gap, longest_bytes=longest_bytes)
        offsets = self.positions[first] * record_bytes
        lengths = (self.positions[first + count - 1] + 1) * record_bytes - offsets
        stops = np.cumsum(lengths)
        starts = stops - lengths
        buffer = lend(int(stops[-1]))
        memory = buffer.data
        columns = (self.shards[first], offsets, starts, stops)
        ranges = [
            (shard, offset, memory[start:stop])
            for shard, offset, start, stop in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
        in_buffer = np.repeat(starts - offsets, count) + self.positions * record_bytes
        return ranges, buffer.ctypes.data + in_buffer, buffer

    def runs(
        self,
        record_bytes: int,
        *,
        gap: int = 0,
        contiguous_output: bool = False,
        longest_bytes: int = RUN_BYTES,
    ) -> tuple[Ints, Ints]:
        """Return the runs of the batch. A run is a range of records in one shard that
        one request reads.

        Args:
            gap: maximum number of records outside the batch between two neighbouring
                records of a run.
            contiguous_output: whether the records of a run must be neighbours in the
                output array too.
            longest_bytes: maximum size of the records of a run in bytes. Records in
                gaps do not count.

        Returns:
            int64 [r], index in the batch of the first record of each run; and int64
            [r], number of records of the batch in each run.
        """
        is_apart = (np.diff(self.shards) != 0) | (np.diff(self.positions) > 1 + gap)
        if contiguous_output:
            is_apart |= np.diff(self.out_indices) != 1
        longest = max(1, longest_bytes // record_bytes)
        edges = np.concatenate([[0], np.flatnonzero(is_apart) + 1, [len(self)]])
        if (np.diff(edges) > longest).any():
            parts = [
                np.arange(start, stop, longest)
                for start, stop in itertools.pairwise(edges.tolist())
            ]
            edges = np.concatenate([*parts, [len(self)]])
        return edges[:-1], np.diff(edges)
