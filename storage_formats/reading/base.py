"""What the ways to read share: which records are asked for, where they land, and the interface of an engine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Records

PIECE_RECORDS = 128  # some milliseconds of a disk; several such pieces are in flight
RUN_BYTES = 1 << 20  # the kernel cuts WILLNEED at its largest readahead, 4 MiB where it is set high

Ints = NDArray[np.int64]
Finish = Callable[[], None]


@dataclass(frozen=True)
class Batch:
    """Records to read, each once, in the order of the files.

    Attributes:
        shards: [n], ascending.
        positions: [n], place within the shard, ascending there.
        places: [n], where the block goes in the answer.
    """

    shards: Ints
    positions: Ints
    places: Ints

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, chosen: slice | NDArray[np.bool_]) -> Batch:
        return Batch(self.shards[chosen], self.positions[chosen], self.places[chosen])

    @functools.cached_property
    def stretches(self) -> list[tuple[int, int, int]]:
        """Of each shard its number and which records are its: (shard, start, stop). Not of an empty batch."""
        if self.shards[0] == self.shards[-1]:
            return [(int(self.shards[0]), 0, len(self))]
        edges = [0, *(np.flatnonzero(np.diff(self.shards)) + 1).tolist(), len(self)]
        return list(zip(self.shards[edges[:-1]].tolist(), edges, edges[1:], strict=False))

    def spread(self, values: list[int]) -> Ints:
        """One value for each shard to one for each record, [n]."""
        counts = [stop - start for _, start, stop in self.stretches]
        return np.repeat(np.array(values, dtype=np.int64), counts)

    def pieces(self, length: int) -> list[Batch]:
        """Consecutive parts of `length` records, the last of fewer."""
        return [self[start : start + length] for start in range(0, len(self), length)]


class Target(Protocol):
    """Where the records of a batch go. An engine reads record i into `records[slots[i]]` and calls `finish` in the
    end, or reads all of them elsewhere and gives them to `take`."""

    direct: bool
    """Whether what is read into `records` is spared a copy."""
    slots: Ints

    @property
    def records(self) -> Records:
        """Memory for records, made when it is first asked for."""
        ...

    def take(self, memory: Records, starts: Ints, part: slice, threads: int | None) -> None:
        """The records `part` of the batch begin at bytes `starts` of `memory`, which is free again afterwards.

        Called once for all, or for parts that together are all. At most `threads` threads work, None: as many as are.
        """
        ...

    def finish(self, threads: int | None) -> None:
        """All have arrived in `records`."""
        ...


@dataclass(frozen=True)
class Runs:
    """Neighbouring records of a batch that one request reads: `first[j]` to `first[j] + count[j]` of the batch."""

    first: Ints
    count: Ints

    @classmethod
    def of(cls, batch: Batch, record_bytes: int, *, gap: int = 0, slots: Ints | None = None) -> Runs:
        """Runs with at most `gap` records that nobody asked for between two, none much longer than `RUN_BYTES`.

        Where `slots` are given, a run also stays together in memory.
        """
        apart = (np.diff(batch.shards) != 0) | (np.diff(batch.positions) > 1 + gap)
        if slots is not None:
            apart |= np.diff(slots) != 1
        longest = max(1, RUN_BYTES // record_bytes)
        edges = np.concatenate([[0], np.flatnonzero(apart) + 1, [len(batch)]])
        if (np.diff(edges) > longest).any():
            parts = [np.arange(start, stop, longest) for start, stop in itertools.pairwise(edges.tolist())]
            edges = np.concatenate([*parts, [len(batch)]])
        return cls(edges[:-1], np.diff(edges))


class Reader(Protocol):
    """Reads pieces for one caller, several at once."""

    piece_records: int
    """How long pieces are at most."""

    @property
    def ahead(self) -> int:
        """How many pieces are worth having in flight, which may depend on those that are."""
        ...

    def start(self, batch: Batch, target: Target) -> Finish:
        """Begin to read; the call of what is returned waits for it and has it land. CorruptIndexError from either."""
        ...


class Engine(Protocol):
    """A way to read. Thread-safe: each `reader()` is of one caller."""

    name: str

    def reader(self) -> AbstractContextManager[Reader]:
        """A reader; leaving its context waits until nothing writes to any target, also after an error."""
        ...

    def close(self) -> None:
        """Give back what idle readers keep."""
        ...
