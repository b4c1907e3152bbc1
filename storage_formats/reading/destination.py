"""Destinations, which write records to the array of the caller, either unchanged or decoded."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import numpy as np

from storage_formats.codecs import Blocks, Codec, Records
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.interrupts import settle, unsettled
from storage_formats.reading.base import (
    Batch,
    Destination,
    DestinationFactory,
    Finish,
    Ints,
    Part,
    ReadEngine,
)
from storage_formats.reading.checksums import BlockCheck
from storage_formats.reading.memory import BufferPool, Bytes, check_memory, copy_memory, memory_check

Checker = Callable[[Batch], BlockCheck]
"""A function that returns the `BlockCheck` for a batch. It may read checksum files, so it is called after the records
have arrived."""
PartCheck = Callable[[Part], BlockCheck]
"""A function that returns the `BlockCheck` for one part of a piece."""


def block_destinations(
    codec: Codec, out: Blocks, buffers: BufferPool, checker: Checker | None = None
) -> DestinationFactory:
    """Return a factory of destinations that decode records with `codec` and write the blocks to `out` [k, m, d]."""
    if codec.name == BF16Codec.name:
        return record_destinations(out.view(np.uint8).reshape(len(out), codec.record_bytes), checker)

    def decoded(batch: Batch) -> Destination:
        return DecodedDestination(codec, out, batch.out_indices, buffers, _part_check(batch, checker))

    return decoded


def record_destinations(records: Records, checker: Checker | None = None) -> DestinationFactory:
    """Return a factory of destinations that write records unchanged to `records` [k, record_bytes]."""
    return lambda batch: RecordDestination(records, batch.out_indices, _part_check(batch, checker))


def _part_check(batch: Batch, checker: Checker | None) -> PartCheck | None:
    if checker is None:
        return None
    of_batch = functools.cache(lambda: checker(batch))
    return lambda part: of_batch()[part]


class RecordDestination:
    """Writes records unchanged to the array of the caller. See `base.Destination`."""

    direct = True

    def __init__(self, records: Records, record_indices: Ints, check: PartCheck | None = None) -> None:
        self.records = records
        self.record_indices = record_indices
        self._check = check

    def take(self, memory: Bytes, offsets: Ints, part: Part, threads: int | None) -> None:
        copy_memory(
            memory.ctypes.data + offsets,
            self._addresses[part],
            self.records.shape[1],
            threads,
            total=self._total,
            check=self._check(part) if self._check else None,
        )

    def finish(self, part: Part, threads: int | None) -> None:
        if self._check:
            check_memory(self._addresses[part], self.records.shape[1], self._check(part), threads, total=self._total)

    @property
    def _addresses(self) -> Ints:
        addresses: Ints = self.records.ctypes.data + self.record_indices * self.records.shape[1]
        return addresses

    @property
    def _total(self) -> int:
        return len(self.record_indices) * int(self.records.shape[1])


class DecodedDestination:
    """Decodes records and writes the blocks to `out`. See `base.Destination`."""

    direct = False

    def __init__(
        self, codec: Codec, out: Blocks, out_indices: Ints, buffers: BufferPool, check: PartCheck | None = None
    ) -> None:
        self._codec = codec
        self._out = out
        self._out_indices = out_indices
        self._buffers = buffers
        self._check = check
        self._buffer: Bytes | None = None
        self._unfinished = len(out_indices)
        self.record_indices = np.arange(len(out_indices))

    @functools.cached_property
    def records(self) -> Records:
        size = len(self._out_indices) * self._codec.record_bytes
        self._buffer = self._buffers.borrow(size)
        return self._buffer[:size].reshape(len(self._out_indices), -1)

    def take(self, memory: Bytes, offsets: Ints, part: Part, threads: int | None) -> None:
        check = None
        if self._check:
            check = memory_check(memory.ctypes.data + offsets, self._codec.record_bytes, self._check(part))
        self._codec.scatter(memory, offsets, self._out, self._out_indices[part], threads, check)

    def finish(self, part: Part, threads: int | None) -> None:
        offsets = self.record_indices[part] * self._codec.record_bytes
        self.take(self.records.reshape(-1), offsets, part, threads)
        self._unfinished -= len(offsets)
        if self._buffer is not None and not self._unfinished:
            self._buffers.give_back(self._buffer)


def read_batch(engine: ReadEngine, batch: Batch, destinations: DestinationFactory) -> None:
    """Read all records of `batch`, with several pieces in flight.

    After this function returns or raises an exception, no read writes to a destination.

    Raises:
        CorruptIndexError: a file cannot be read, or a record is damaged.
    """
    pending = unsettled()
    settle(pending)
    reader = engine.reader()
    try:
        in_flight: deque[Finish] = deque()
        for piece in batch.pieces(reader.piece_records):
            while in_flight and len(in_flight) >= reader.ahead:
                in_flight.popleft()()
            in_flight.append(reader.start(piece, destinations(piece)))
        while in_flight:
            in_flight.popleft()()
        reader.close()
    except BaseException:
        pending.append(reader.abandon)
        settle(pending)
        raise
