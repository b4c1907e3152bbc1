"""The interface of read engines, and the types in this interface."""

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
"""Some records of a piece, as a slice or as ascending indices."""
EVERY_RECORD = slice(None)
Finish = Callable[[], None]


@dataclass(frozen=True)
class Batch:
    """Records to read, sorted by shard and position. Each record occurs once.

    Attributes:
        shards: int64 [n], shard number of each record, ascending.
        positions: int64 [n], position of each record in its shard, ascending within a shard.
        out_indices: int64 [n], index of each record in the output array.
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
        """Return (shard, start, stop) for each shard. The records of the shard are [start, stop) of the batch.

        The batch must not be empty.
        """
        if self.shards[0] == self.shards[-1]:
            return [(int(self.shards[0]), 0, len(self))]
        edges = [0, *(np.flatnonzero(np.diff(self.shards)) + 1).tolist(), len(self)]
        return list(zip(self.shards[edges[:-1]].tolist(), edges, edges[1:], strict=False))

    def per_record(self, values: list[int]) -> Ints:
        """Return an array with one value per record, int64 [n]. `values` contains one value per shard of the batch."""
        counts = [stop - start for _, start, stop in self.shard_spans]
        return np.repeat(np.array(values, dtype=np.int64), counts)

    def pieces(self, length: int) -> list[Batch]:
        """Split the batch into consecutive pieces of `length` records; the last piece may be shorter."""
        return [self[start : start + length] for start in range(0, len(self), length)]


class Destination(Protocol):
    """Receives the records of one piece. A piece is a part of a batch.

    An engine has two choices. It can read record i of the piece into `records[record_indices[i]]` and call `finish`. Or
    it can read the records into memory of the engine and pass this memory to `take`. The engine may call `finish` or
    `take` several times, once for each part of the piece.
    """

    direct: bool
    """True if reading into `records` avoids a copy."""
    record_indices: Ints

    @property
    def records(self) -> Records:
        """Memory into which an engine may read the records of the piece. It is allocated at the first access."""
        ...

    def take(self, memory: Records, offsets: Ints, part: Part, threads: int | None) -> None:
        """Process the records `piece[part]`. The k records start at the byte offsets `offsets` [k] of `memory`.

        After this call, the engine may overwrite `memory`.
        """
        ...

    def finish(self, part: Part, threads: int | None) -> None:
        """Process the records `piece[part]`. The engine has read these records into `records`."""
        ...


DestinationFactory = Callable[[Batch], Destination]
"""A function that creates the destination of a piece."""


@dataclass(frozen=True)
class Runs:
    """The runs of a batch. A run is a range of neighbouring records that one request reads.

    Attributes:
        first: int64 [r], index in the batch of the first record of each run.
        count: int64 [r], number of records in each run.
    """

    first: Ints
    count: Ints

    @classmethod
    def of(
        cls,
        batch: Batch,
        record_bytes: int,
        *,
        gap: int = 0,
        record_indices: Ints | None = None,
        longest_bytes: int = RUN_BYTES,
    ) -> Runs:
        """Split a batch into runs of about `longest_bytes` bytes or less.

        Args:
            batch: records to read.
            record_bytes: length of a record in bytes.
            gap: maximum number of records outside the batch between two neighbouring records of a run.
            record_indices: int64 [n], index of each record in the memory of the destination. If given, the records of a
                run are also contiguous in this memory.
            longest_bytes: maximum length of a run in bytes, without gaps.
        """
        is_apart = (np.diff(batch.shards) != 0) | (np.diff(batch.positions) > 1 + gap)
        if record_indices is not None:
            is_apart |= np.diff(record_indices) != 1
        longest = max(1, longest_bytes // record_bytes)
        edges = np.concatenate([[0], np.flatnonzero(is_apart) + 1, [len(batch)]])
        if (np.diff(edges) > longest).any():
            parts = [np.arange(start, stop, longest) for start, stop in itertools.pairwise(edges.tolist())]
            edges = np.concatenate([*parts, [len(batch)]])
        return cls(edges[:-1], np.diff(edges))


class Reader(Protocol):
    """Reads the pieces of a batch for one caller. Several pieces may be in flight at the same time."""

    piece_records: int
    """Maximum number of records in a piece."""

    @property
    def ahead(self) -> int:
        """Maximum number of pieces to keep in flight."""
        ...

    def start(self, batch: Batch, destination: Destination) -> Finish:
        """Start to read the piece `batch` into `destination`.

        Returns a function that waits for the records and passes them to `destination`.

        Raises:
            CorruptIndexError: a file is missing or damaged. The returned function may raise this error too.
        """
        ...

    def close(self) -> None:
        """Free the resources of the reader. No piece may be in flight."""
        ...

    def abandon(self) -> None:
        """Call this after an exception. Waits until no read writes to memory. See `storage_formats.interrupts`."""
        ...


class ReadEngine(Protocol):
    """A method to read records, for example through io_uring. Thread-safe: each caller uses a separate `reader()`."""

    name: str

    def reader(self) -> Reader:
        """Return a new reader. The caller must call `close` of the reader, or `abandon` after an exception."""
        ...

    def close(self) -> None:
        """Free the resources of idle readers."""
        ...
