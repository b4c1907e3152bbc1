"""From records to the caller's blocks: where engines put what they read, and what happens to it there."""

from __future__ import annotations

import functools
from collections import deque
from typing import Protocol

import numpy as np

from storage_formats.codecs import Blocks, Codec, Records
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.reading.base import Batch, Engine, Finish, Ints, Target
from storage_formats.reading.memory import BufferPool, Bytes, copy_memory


class Landing(Protocol):
    """Turns records into blocks of the answer."""

    def target(self, batch: Batch) -> Target:
        """Where the records of `batch` go."""
        ...


def landing(codec: Codec, out: Blocks, buffers: BufferPool) -> Landing:
    """What brings records of `codec` to `out` [k, m, d]."""
    if codec.name == BF16Codec.name:
        return StraightLanding(out.view(np.uint8).reshape(len(out), codec.record_bytes))
    return _Decoding(codec, out, buffers)


class StraightLanding:
    """Records that are asked for as they are stored, or that are blocks: read into the answer [k, record_bytes]."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def target(self, batch: Batch) -> Target:
        return _Straight(self._records, batch.places)


class _Straight:
    """The answer itself. See `base.Target`."""

    direct = True

    def __init__(self, records: Records, slots: Ints) -> None:
        self.records = records
        self.slots = slots

    def take(self, memory: Bytes, starts: Ints, part: slice, threads: int | None) -> None:
        size = self.records.shape[1]
        targets = self.records.ctypes.data + self.slots[part] * size
        copy_memory(memory.ctypes.data + starts, targets, size, threads, total=len(self.slots) * size)

    def finish(self, threads: int | None) -> None:
        """They are where they belong."""


class _Decoding:
    """Records that are decoded from wherever they were read to."""

    def __init__(self, codec: Codec, out: Blocks, buffers: BufferPool) -> None:
        self._codec = codec
        self._out = out
        self._buffers = buffers

    def target(self, batch: Batch) -> Target:
        return _Decoded(self._codec, self._out, batch.places, self._buffers)


class _Decoded:
    """Blocks of the answer to which records are decoded. See `base.Target`."""

    direct = False

    def __init__(self, codec: Codec, out: Blocks, places: Ints, buffers: BufferPool) -> None:
        self._codec = codec
        self._out = out
        self._places = places
        self._buffers = buffers
        self._buffer: Bytes | None = None
        self.slots = np.arange(len(places))

    @functools.cached_property
    def records(self) -> Records:
        size = len(self._places) * self._codec.record_bytes
        self._buffer = self._buffers.borrow(size)
        return self._buffer[:size].reshape(len(self._places), -1)

    def take(self, memory: Bytes, starts: Ints, part: slice, threads: int | None) -> None:
        self._codec.scatter(memory, starts, self._out, self._places[part], threads)

    def finish(self, threads: int | None) -> None:
        starts = self.slots * self._codec.record_bytes
        self.take(self.records.reshape(-1), starts, slice(None), threads)
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)


def read_batch(engine: Engine, batch: Batch, landing: Landing) -> None:
    """Read all of `batch`, several pieces in flight. CorruptIndexError as the engine finds it."""
    with engine.reader() as reader:
        waiting: deque[Finish] = deque()
        for piece in batch.pieces(reader.piece_records):
            while waiting and len(waiting) >= reader.ahead:
                waiting.popleft()()
            waiting.append(reader.start(piece, landing.target(piece)))
        while waiting:
            waiting.popleft()()
