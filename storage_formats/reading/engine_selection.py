"""Which engine reads which records: by name, or by what the page cache holds (`auto`).

What `auto` goes by was measured; see docs/architecture.md.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError
from storage_formats.reading.admission import Admission
from storage_formats.reading.aio import AioQueue, aio_works
from storage_formats.reading.base import Batch, Engine
from storage_formats.reading.buffered import BufferedEngine, PortableEngine
from storage_formats.reading.files import ShardFile, ShardFiles
from storage_formats.reading.mapped import MappedEngine
from storage_formats.reading.memory import BufferPool
from storage_formats.reading.page_cache import cache_room, resident_records, resident_share
from storage_formats.reading.queued import QueuedEngine
from storage_formats.reading.queues import QueuePool
from storage_formats.reading.ring import Ring, io_uring_works

_NAMES = ("io_uring", "direct", "sequential", "buffered", "mapped", "portable")
_DENSE_RECORDS = 8  # of a shard: from here on the whole stretch is looked up, below a few records stand for all
_SAMPLE = 8
_SEQUENTIAL_SHARE = 0.95  # below it, what nobody asked for costs more than larger requests save
_SEQUENTIAL_GAP_BYTES = 96 << 10
_GAP_BYTES = 32 << 10  # up to here reading on costs the device less than another request
_TRUSTED_SECONDS = 2.0
_WORTH_CACHE = 0.5  # share in the page cache from which on reading through it is faster


@dataclass(frozen=True)
class StoreFiles:
    """The token files of one precision.

    Attributes:
        path: of a shard's file.
        record_bytes: length of a record.
        shard_rows: records of a shard.
        rows: records of all.
    """

    path: Callable[[int], Path]
    record_bytes: int
    shard_rows: int
    rows: int


@functools.cache
def engines() -> tuple[str, ...]:
    """Names of the engines that work on this machine; `auto` chooses among them."""
    linux = sys.platform == "linux"
    queued = io_uring_works() or aio_works()
    available = {
        "io_uring": io_uring_works(),
        "direct": aio_works(),
        "sequential": queued,
        "buffered": linux,
        "mapped": linux,
        "portable": True,
    }
    return tuple(name for name, works in available.items() if works)


class Engines:
    """The engines of one store and the choice among them. Thread-safe.

    Args:
        files: of the store.
        name: an engine of `engines()`, or `auto`. UsageError for another.
    """

    def __init__(self, files: StoreFiles, name: str) -> None:
        available = engines()
        if name not in ("auto", *available):
            known = ", ".join(("auto", *available))
            raise UsageError(f"engine '{name}' is unknown or does not work here; give one of: {known}")
        self.buffers = BufferPool()
        self._name = name
        self._files = files
        self._plain = ShardFiles(files.path, files.record_bytes)
        self._direct = ShardFiles(files.path, files.record_bytes, direct=True)
        self._engines = {engine.name: engine for engine in self._make()}
        self._cold, self._through_cache = (
            next(name for name in names if name in available)
            for names in (("io_uring", "direct", "buffered", "portable"), ("buffered", "portable"))
        )
        fits = name == "auto" and files.rows * files.record_bytes <= cache_room()
        self._admission = Admission(files.shard_rows * files.record_bytes) if fits else None

    def split(self, batch: Batch) -> list[tuple[Engine, Batch]]:
        """Which engine is to read which part of `batch`, every record in one part."""
        if self._name not in ("auto", "mapped"):
            return [(self._engines[self._name], batch)]
        codes = self._codes(batch)
        first = int(codes[0])
        if (codes == first).all():
            return [(self._engines[_NAMES[first]], batch)]
        return [(self._engines[_NAMES[code]], batch[codes == code]) for code in np.unique(codes).tolist()]

    def announce(self, batch: Batch) -> None:
        """Have the kernel begin to read `batch` into the page cache; returns while it does."""
        BufferedEngine(self._plain).announce(batch)

    def close(self) -> None:
        """Close files, and give back idle queues and buffers; all are made again when needed."""
        for engine in self._engines.values():
            engine.close()
        self._plain.close()
        self._direct.close()
        self.buffers.close()

    def _make(self) -> list[Engine]:
        rings, contexts = QueuePool(Ring), QueuePool(AioQueue)
        gap_queues = rings if io_uring_works() else contexts
        return [
            BufferedEngine(self._plain),
            PortableEngine(self._plain),
            MappedEngine(self._plain),
            QueuedEngine("io_uring", self._direct, rings, self.buffers, _GAP_BYTES),
            QueuedEngine("direct", self._direct, contexts, self.buffers, _GAP_BYTES),
            QueuedEngine("sequential", self._direct, gap_queues, self.buffers, _SEQUENTIAL_GAP_BYTES, gathered=True),
        ]

    def _codes(self, batch: Batch) -> NDArray[np.int8]:
        """The engine for each record, by its place in `_NAMES`, [n]."""
        codes = np.empty(len(batch), dtype=np.int8)
        few = [start for _, start, stop in batch.stretches if stop - start < _DENSE_RECORDS]
        sample = few[:: -(-len(few) // _SAMPLE) or 1]
        cached = sum(self._share(batch, start) for start in sample) / max(1, len(sample))
        for _, start, stop in batch.stretches:
            alone = stop - start < _DENSE_RECORDS
            resident = None if alone else self._resident(batch[start:stop])
            if resident is not None:
                codes[start:stop] = np.where(resident, _NAMES.index("mapped"), _NAMES.index(self._through_cache))
            elif (alone and cached >= _WORTH_CACHE) or self._name == "mapped" or self._admits(batch, start, stop):
                codes[start:stop] = _NAMES.index(self._through_cache)
            else:
                codes[start:stop] = _NAMES.index(self._cold_name(batch, start, stop))
        return codes

    def _admits(self, batch: Batch, start: int, stop: int) -> bool:
        """Whether what is not in the page cache should be brought there."""
        if self._admission is None:
            return False
        size = (stop - start) * self._files.record_bytes
        shard, position = int(batch.shards[start]), int(batch.positions[start])
        return self._admission.through_cache(shard, position, size, self._is_resident)

    def _cold_name(self, batch: Batch, start: int, stop: int) -> str:
        """The engine for records of one shard that are to be read from the device."""
        if not self._direct.past_cache:
            return self._through_cache
        count = stop - start
        stretch = int(batch.positions[stop - 1] - batch.positions[start]) + 1
        if count < max(_DENSE_RECORDS, _SEQUENTIAL_SHARE * stretch):
            return self._cold
        scattered = bool((np.diff(batch.places[start:stop]) != 1).any())
        return "sequential" if scattered and "sequential" in engines() else self._cold

    def _share(self, batch: Batch, index: int, *, unknown: float = 0.0) -> float:
        """Share of a record that is in the page cache; `unknown` where that cannot be told."""
        part = batch[index : index + 1]
        files = self._plain.acquire(part)
        try:
            return self._shares(next(iter(files.values())), part.positions, unknown)
        finally:
            self._plain.release(files)

    def _shares(self, file: ShardFile, positions: NDArray[np.int64], unknown: float = 0.0) -> float:
        size = self._files.record_bytes
        starts = [position * size for position in positions.tolist()]
        shares = [resident_share(file, start, start + size) for start in starts]
        return sum(unknown if share is None else share for share in shares) / len(shares)

    def _resident(self, part: Batch) -> NDArray[np.bool_] | None:
        """Which records of one shard are in the page cache, [n]; None where most of a sample are not.

        To look up all is dear (0.1 ms for 50 MB): so what was found is taken to hold for some seconds more,
        as long as a record is still there.
        """
        files = self._plain.acquire(part)
        try:
            file, middle = next(iter(files.values())), len(part) // 2
            known = file.resident if time.monotonic() - file.resident_at < _TRUSTED_SECONDS else None
            expected = known is not None and known[part.positions[middle]]
            if known is not None and expected and self._shares(file, part.positions[[middle]]) >= _WORTH_CACHE:
                return known[part.positions]
            if self._shares(file, part.positions[[0, middle, -1]]) < _WORTH_CACHE:
                return None
            if known is None or expected:  # not looked up, or evicted since
                known = resident_records(file, self._files.record_bytes)
                file.resident, file.resident_at = known, time.monotonic()
            return known[part.positions]
        finally:
            self._plain.release(files)

    def _is_resident(self, shard: int, position: int) -> bool:
        one = (np.array([number]) for number in (shard, position, 0))
        return self._share(Batch(*one), 0, unknown=1.0) >= _WORTH_CACHE  # no eviction is known of
