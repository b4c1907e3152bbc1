"""Types that the read engines share: the records to read, their destination, and the interface of an engine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Records

PIECE_RECORDS = 128  # a few milliseconds of a disk's time; several such pieces are in flight
RUN_BYTES = 1 << 20  # the kernel cuts WILLNEED at its largest readahead, which is 4 MiB at most

Ints = NDArray[np.int64]
Finish = Callable[[], None]


@dataclass(frozen=True)
class Batch:
    """Records to read, each once, in file order.

    Attributes:
        shards: [n], ascending shard numbers.
        positions: [n], position within the shard, ascending within each shard.
        out_indices: [n], index of the block in the output.
    """

    shards: Ints
    positions: Ints
    out_indices: Ints

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, selection: slice | NDArray[np.bool_]) -> Batch:
        return Batch(self.shards[selection], self.positions[selection], self.out_indices[selection])

    @functools.cached_property
    def shard_spans(self) -> list[tuple[int, int, int]]:
        """(shard, start, stop) of each shard: it holds records [start, stop) of the batch, which must not be empty."""
        if self.shards[0] == self.shards[-1]:
            return [(int(self.shards[0]), 0, len(self))]
        edges = [0, *(np.flatnonzero(np.diff(self.shards)) + 1).tolist(), len(self)]
        return list(zip(self.shards[edges[:-1]].tolist(), edges, edges[1:], strict=False))

    def per_record(self, values: list[int]) -> Ints:
        """Expand one value per shard to one value per record, [n]."""
        counts = [stop - start for _, start, stop in self.shard_spans]
        return np.repeat(np.array(values, dtype=np.int64), counts)

    def pieces(self, length: int) -> list[Batch]:
        """Consecutive parts of `length` records; the last may be shorter."""
        return [self[start : start + length] for start in range(0, len(self), length)]


class Destination(Protocol):
    """Receives the records of one piece.

    An engine either reads record i into `records[record_indices[i]]` and then calls `finish`, or reads all records
    into its own memory and passes them to `take`.
    """

    direct: bool
    """Whether reading into `records` avoids a copy."""
    record_indices: Ints

    @property
    def records(self) -> Records:
        """Memory for records, allocated at the first access."""
        ...

    def take(self, memory: Records, offsets: Ints, part: slice, threads: int | None) -> None:
        """Take the records `part` of the piece from `memory`, where they start at bytes `offsets`.

        The engine may call this once for the whole piece or for parts that cover it. It reuses `memory` afterwards.
        `threads` is the maximum number of threads; None uses `default_threads()`.
        """
        ...

    def finish(self, threads: int | None) -> None:
        """Process the records, all of which are now in `records`."""
        ...


DestinationFactory = Callable[[Batch], Destination]
"""Makes the destination of a piece."""


@dataclass(frozen=True)
class Runs:
    """Neighbouring records of a batch that one request reads.

    Attributes:
        first: [r], index within the batch of the first record of each run.
        count: [r], number of records of each run.
    """

    first: Ints
    count: Ints

    @classmethod
    def of(cls, batch: Batch, record_bytes: int, *, gap: int = 0, record_indices: Ints | None = None) -> Runs:
        """Split a batch into runs of about `RUN_BYTES` at most.

        Args:
            batch: records to read.
            record_bytes: length of a record.
            gap: maximum number of unrequested records that a run may read between two requested ones.
            record_indices: [n], destination of each record in memory; if given, a run is contiguous there as well.
        """
        is_apart = (np.diff(batch.shards) != 0) | (np.diff(batch.positions) > 1 + gap)
        if record_indices is not None:
            is_apart |= np.diff(record_indices) != 1
        longest = max(1, RUN_BYTES // record_bytes)
        edges = np.concatenate([[0], np.flatnonzero(is_apart) + 1, [len(batch)]])
        if (np.diff(edges) > longest).any():
            parts = [np.arange(start, stop, longest) for start, stop in itertools.pairwise(edges.tolist())]
            edges = np.concatenate([*parts, [len(batch)]])
        return cls(edges[:-1], np.diff(edges))


class Reader(Protocol):
    """Reads pieces for one caller, several at a time."""

    piece_records: int
    """Maximum number of records of a piece."""

    @property
    def ahead(self) -> int:
        """Number of pieces to keep in flight. It may depend on the pieces that are in flight now."""
        ...

    def start(self, batch: Batch, destination: Destination) -> Finish:
        """Start to read a piece.

        Returns a function that waits until the piece is read and has the destination process it. Both may raise
        CorruptIndexError.
        """
        ...

    def close(self) -> None:
        """Free what the reader holds. All its pieces must have been read."""
        ...

    def abandon(self) -> None:
        """Wait until nothing writes to a destination, after an exception. See `storage_formats.interrupts`."""
        ...


class ReadEngine(Protocol):
    """A way to read records. Thread-safe: each `reader()` serves one caller."""

    name: str

    def reader(self) -> Reader:
        """A new reader. The caller must call `close` or, after an exception, `abandon`."""
        ...

    def close(self) -> None:
        """Free the resources of idle readers."""
        ...
