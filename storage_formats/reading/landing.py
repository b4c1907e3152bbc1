"""From records to the caller's blocks: where engines put what they read, and what happens to it there."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from storage_formats.codecs import Blocks, Codec, Records
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.reading.base import Batch, Engine, Finish, Target
from storage_formats.reading.memory import BufferPool


class Landing(Protocol):
    """Turns the records of a batch into blocks of the answer, at most `piece_records` at once."""

    piece_records: int

    def target(self, batch: Batch) -> Target:
        """Memory for the records of `batch`."""
        ...

    def land(self, batch: Batch, target: Target, threads: int | None) -> None:
        """The records of `batch` have arrived; `target` is not used again. Up to `threads` threads may work."""
        ...


def landing(codec: Codec, out: Blocks, buffers: BufferPool) -> Landing:
    """What brings records of `codec` to `out` [k, m, d]."""
    if codec.name == BF16Codec.name:
        return StraightLanding(out.view(np.uint8).reshape(len(out), codec.record_bytes))
    return _Decoded(codec, out, buffers)


class StraightLanding:
    """Records that are asked for as they are stored, or that are blocks: read into the answer [k, record_bytes]."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.piece_records = len(records)

    def target(self, batch: Batch) -> Target:
        return Target(self._records, batch.places)

    def land(self, batch: Batch, target: Target, threads: int | None) -> None:
        """They are where they belong."""


class _Decoded:
    """Records that are decoded a piece at a time, while they are in the processor's cache and others are read."""

    piece_records = 128  # enough for several threads, and stays in the processor's cache until it is decoded

    def __init__(self, codec: Codec, out: Blocks, buffers: BufferPool) -> None:
        self._codec = codec
        self._out = out
        self._buffers = buffers

    def target(self, batch: Batch) -> Target:
        buffer = self._buffers.borrow(len(batch) * self._codec.record_bytes)
        records = buffer[: len(batch) * self._codec.record_bytes].reshape(len(batch), -1)
        return Target(records, np.arange(len(batch)), buffer)

    def land(self, batch: Batch, target: Target, threads: int | None) -> None:
        self._codec.scatter(target.records, self._out, batch.places, threads)
        if target.buffer is not None:
            self._buffers.give_back(target.buffer)


def read_batch(engine: Engine, batch: Batch, landing: Landing) -> None:
    """Read all of `batch`, several pieces in flight. CorruptIndexError as the engine finds it."""
    with engine.reader() as reader:
        waiting: deque[tuple[Batch, Target, Finish]] = deque()

        def land_oldest() -> None:
            piece, target, finish = waiting.popleft()
            finish()
            landing.land(piece, target, reader.decode_threads)

        for piece in batch.pieces(min(reader.piece_records, landing.piece_records)):
            while waiting and len(waiting) >= reader.ahead:
                land_oldest()
            target = landing.target(piece)
            waiting.append((piece, target, reader.start(piece, target)))
        while waiting:
            land_oldest()
