"""Types that the read engines share: records to read, destinations, and engines."""

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
Part = slice | Ints
"""Some records of a piece: a slice, or ascending indices."""
EVERY_RECORD = slice(None)
Finish = Callable[[], None]


@dataclass(frozen=True)
class Batch:
    """Records to read, sorted by shard and position. Each record occurs once.

    Attributes:
        shards: int64 [n], shard number of each record, ascending.
        positions: int64 [n], position of each record within its shard, ascending within each shard.
        out_indices: int64 [n], index of each record in the output.
    """

    shards: Ints
    positions: Ints
    out_indices: Ints

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, selection: Part | NDArray[np.bool_]) -> Batch:
        return Batch(self.shards[selection], self.positions[selection], self.out_indices[selection])

    @functools.cached_property
    def shard_spans(self) -> list[tuple[int, int, int]]:
        """Return (shard, start, stop) of each shard: its records are [start, stop) of the batch.

        The batch must not be empty.
        """
        if self.shards[0] == self.shards[-1]:
            return [(int(self.shards[0]), 0, len(self))]
        edges = [0, *(np.flatnonzero(np.diff(self.shards)) + 1).tolist(), len(self)]
        return list(zip(self.shards[edges[:-1]].tolist(), edges, edges[1:], strict=False))

    def per_record(self, values: list[int]) -> Ints:
        """Repeat the value of each shard for each of its records, int64 [n]."""
        counts = [stop - start for _, start, stop in self.shard_spans]
        return np.repeat(np.array(values, dtype=np.int64), counts)

    def pieces(self, length: int) -> list[Batch]:
        """Split the batch into consecutive pieces of `length` records; the last piece may be shorter."""
        return [self[start : start + length] for start in range(0, len(self), length)]


class Destination(Protocol):
    """Receives the records of one piece, which is a part of a batch.

    An engine reads each record i into `records[record_indices[i]]`, and then calls `finish`. Or it reads all records
    into its own memory, and passes them to `take`. It may call `finish` or `take` several times, for parts that
    together cover the piece.
    """

    direct: bool
    """True if reading into `records` avoids a copy."""
    record_indices: Ints

    @property
    def records(self) -> Records:
        """Memory into which an engine may read records; allocated at the first access."""
        ...

    def take(self, memory: Records, offsets: Ints, part: Part, threads: int | None) -> None:
        """Process the records `piece[part]`, which start at bytes `offsets` [k] of `memory`.

        The engine reuses `memory` afterwards.
        """
        ...

    def finish(self, part: Part, threads: int | None) -> None:
        """Process the records `piece[part]`, which the engine has read into `records`."""
        ...


DestinationFactory = Callable[[Batch], Destination]
"""Makes the destination of a piece."""


@dataclass(frozen=True)
class Runs:
    """Runs of neighbouring records of a batch. One request reads one run.

    Attributes:
        first: [r], index within the batch of the first record of each run.
        count: [r], number of records of each run.
    """

    first: Ints
    count: Ints

    @classmethod
    def of(cls, batch: Batch, record_bytes: int, *, gap: int = 0, record_indices: Ints | None = None) -> Runs:
        """Split a batch into runs of at most about `RUN_BYTES` bytes.

        Args:
            batch: records to read.
            record_bytes: length of a record in bytes.
            gap: maximum number of unrequested records that a run may contain between two requested records.
            record_indices: [n], index of each record in the destination; if given, each run is contiguous there too.
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
    """Reads the pieces of a batch for one caller, several pieces at a time."""

    piece_records: int
    """Maximum number of records of a piece."""

    @property
    def ahead(self) -> int:
        """Return the maximum number of pieces to keep in flight."""
        ...

    def start(self, batch: Batch, destination: Destination) -> Finish:
        """Start to read the piece `batch` into `destination`.

        Returns a function that waits for the records and then calls the destination. Both may raise CorruptIndexError.
        """
        ...

    def close(self) -> None:
        """Free the resources of the reader. Every piece that was started must be finished."""
        ...

    def abandon(self) -> None:
        """After an exception, wait until nothing writes to a destination any more. See `storage_formats.interrupts`."""
        ...


class ReadEngine(Protocol):
    """A way to read records. Thread-safe, because each caller uses its own `reader()`."""

    name: str

    def reader(self) -> Reader:
        """Return a new reader. The caller must call its `close`, or its `abandon` after an exception."""
        ...

    def close(self) -> None:
        """Free the resources of idle readers."""
        ...
