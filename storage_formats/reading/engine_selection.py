"""Selects a read engine for each record, by name or by the state of the page cache.

The report docs/lab/storage-io.md contains the measurements for the thresholds.
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

from storage_formats.errors import CorruptIndexError, UsageError, cannot_read
from storage_formats.format.layout import IndexSpec, padded_shard_bytes
from storage_formats.reading.admission import Admission
from storage_formats.reading.aio import AioQueue, aio_works
from storage_formats.reading.base import Batch, ReadEngine
from storage_formats.reading.buffered import BufferedEngine, PortableEngine
from storage_formats.reading.files import ShardFile, ShardFiles
from storage_formats.reading.mapped import MappedEngine
from storage_formats.reading.memory import BufferPool
from storage_formats.reading.page_cache import cache_room, resident_records, resident_share
from storage_formats.reading.queued import QueuedEngine, QueuedOptions
from storage_formats.reading.queues import QueuePool
from storage_formats.reading.ring import Ring, io_uring_works

_NAMES = ("io_uring", "direct", "sequential", "buffered", "mapped", "portable")
_DENSE_RECORDS = 8  # with fewer requested records in a shard, the page cache is queried for a sample only
_SAMPLE = 8
_SEQUENTIAL_SHARE = 0.95  # below it, reading unrequested records costs more than larger requests save
_SEQUENTIAL_GAP_BYTES = 96 << 10
_GAP_BYTES = 32 << 10  # reading a gap of this length costs the device less than another request
_RESIDENCY_TRUSTED_SECONDS = 2.0
_CACHED_SHARE = 0.5  # reading through the page cache is faster if at least this share is cached


@dataclass(frozen=True)
class StoreFiles:
    """The token files of one precision.

    Attributes:
        path: function that takes a shard number and returns the path of the token file.
        record_bytes: length of a record in bytes.
        spec: shape of the index.
    """

    path: Callable[[int], Path]
    record_bytes: int
    spec: IndexSpec

    def check_lengths(self) -> None:
        """Check the lengths of the first and the last token file.

        A reader allocates memory for the sizes in `index.json`, so this check must detect wrong sizes first.

        Raises:
            CorruptIndexError: a file is missing or has a wrong length.
        """
        for shard in {self.spec.used_segments[0].first_row // self.spec.shard_size, self.spec.shards - 1}:
            rows = len(self.spec.shard_rows(shard))
            _, length = padded_shard_bytes(rows, self.spec.shard_size, self.record_bytes)
            try:
                path = self.path(shard)
                actual = path.stat().st_size
            except OSError as error:
                raise cannot_read(error.filename, error) from error
            if actual != length:
                raise CorruptIndexError(
                    f"the token file {path} has {actual} bytes instead of {length}; run 'edje-index verify'"
                )


@functools.cache
def engines() -> tuple[str, ...]:
    """Return the names of the engines that work on this machine."""
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


class ReadEngines:
    """The read engines of one store. Selects an engine for each record. Thread-safe.

    Args:
        files: token files of the store.
        name: one of `engines()`, or `auto` to select by the state of the page cache.

    Raises:
        UsageError: the engine `name` is unknown or does not work on this machine.
    """

    def __init__(self, files: StoreFiles, name: str) -> None:
        available = engines()
        if name not in ("auto", *available):
            choices = ", ".join(("auto", *available))
            raise UsageError(
                f"the read engine '{name}' is unknown or does not work on this machine; choose one of: {choices}"
            )
        self.buffers = BufferPool()
        self._name = name
        self._files = files
        self._cached_files = cached = ShardFiles(files.path, files.record_bytes)
        self._direct_files = direct = ShardFiles(files.path, files.record_bytes, direct=True)
        rings, contexts = QueuePool(Ring), QueuePool(AioQueue)
        sequential_queues = rings if io_uring_works() else contexts
        random_reads, sequential_reads = QueuedOptions(_GAP_BYTES), QueuedOptions(_SEQUENTIAL_GAP_BYTES, gather=True)
        engines_of_store: list[ReadEngine] = [
            BufferedEngine(cached),
            PortableEngine(cached),
            MappedEngine(cached),
            QueuedEngine("io_uring", direct, rings, self.buffers, random_reads),
            QueuedEngine("direct", direct, contexts, self.buffers, random_reads),
            QueuedEngine("sequential", direct, sequential_queues, self.buffers, sequential_reads),
        ]
        self._engines = {engine.name: engine for engine in engines_of_store}
        self._cold, self._through_cache = (
            next(name for name in names if name in available)
            for names in (("io_uring", "direct", "buffered", "portable"), ("buffered", "portable"))
        )
        fits = name == "auto" and files.spec.used_rows * files.record_bytes <= cache_room()
        self._admission = Admission(files.spec.shard_size * files.record_bytes) if fits else None

    def split(self, batch: Batch) -> list[tuple[ReadEngine, Batch]]:
        """Split `batch` by engine. Return a list of (engine, the part of `batch` to read with this engine)."""
        if self._name not in ("auto", "mapped"):
            return [(self._engines[self._name], batch)]
        codes = self._engine_codes(batch)
        first = int(codes[0])
        if (codes == first).all():
            return [(self._engines[_NAMES[first]], batch)]
        return [(self._engines[_NAMES[code]], batch[codes == code]) for code in np.unique(codes).tolist()]

    def announce(self, batch: Batch) -> None:
        """Ask the kernel to start reading `batch` into the page cache. Returns at once."""
        BufferedEngine(self._cached_files).announce(batch)

    def close(self) -> None:
        """Close all files, and free idle queues and buffers. The store can still be used."""
        for engine in self._engines.values():
            engine.close()
        self._cached_files.close()
        self._direct_files.close()
        self.buffers.close()

    def _engine_codes(self, batch: Batch) -> NDArray[np.int8]:
        """Return the engine of each record as an index in `_NAMES`, int8 [n]."""
        codes = np.empty(len(batch), dtype=np.int8)
        sparse = [start for _, start, stop in batch.shard_spans if stop - start < _DENSE_RECORDS]
        sample = sparse[:: -(-len(sparse) // _SAMPLE) or 1]
        cached_share = sum(self._cached_share(batch, start) for start in sample) / max(1, len(sample))
        for _, start, stop in batch.shard_spans:
            is_sparse = stop - start < _DENSE_RECORDS
            is_unknown = is_sparse and not self._looked_up(int(batch.shards[start]))
            resident = None if is_unknown else self._resident(batch[start:stop])
            if resident is not None:
                codes[start:stop] = np.where(resident, _NAMES.index("mapped"), _NAMES.index(self._through_cache))
            elif (
                (is_sparse and cached_share >= _CACHED_SHARE)
                or self._name == "mapped"
                or self._admits(batch, start, stop)
            ):
                codes[start:stop] = _NAMES.index(self._through_cache)
            else:
                codes[start:stop] = _NAMES.index(self._cold_engine(batch, start, stop))
        return codes

    def _admits(self, batch: Batch, start: int, stop: int) -> bool:
        """Return True if records [start, stop) should be read through the page cache, so that they remain there."""
        if self._admission is None:
            return False
        size = (stop - start) * self._files.record_bytes
        shard, position = int(batch.shards[start]), int(batch.positions[start])
        return self._admission.through_cache(shard, position, size, self._is_resident)

    def _cold_engine(self, batch: Batch, start: int, stop: int) -> str:
        """Return the name of the engine for records [start, stop). The page cache does not contain these records."""
        if not self._direct_files.past_cache:
            return self._through_cache
        count = stop - start
        extent = int(batch.positions[stop - 1] - batch.positions[start]) + 1
        if count < max(_DENSE_RECORDS, _SEQUENTIAL_SHARE * extent):
            return self._cold
        scattered = bool((np.diff(batch.out_indices[start:stop]) != 1).any())
        return "sequential" if scattered and "sequential" in engines() else self._cold

    def _cached_share(self, batch: Batch, index: int, *, if_unknown: float = 0.0) -> float:
        """Return the cached share of record `index`, 0 to 1. Return `if_unknown` if the kernel does not report it."""
        part = batch[index : index + 1]
        files = self._cached_files.acquire(part)
        try:
            return self._mean_share(next(iter(files.values())), part.positions, if_unknown)
        finally:
            self._cached_files.release(files)

    def _mean_share(self, file: ShardFile, positions: NDArray[np.int64], if_unknown: float = 0.0) -> float:
        size = self._files.record_bytes
        starts = [position * size for position in positions.tolist()]
        shares = [resident_share(file, start, start + size) for start in starts]
        return sum(if_unknown if share is None else share for share in shares) / len(shares)

    def _looked_up(self, shard: int) -> bool:
        """Return True if the page cache was queried for the whole shard in the last few seconds."""
        file = self._cached_files.peek(shard)
        return file is not None and _is_recent(file)

    def _resident(self, part: Batch) -> NDArray[np.bool_] | None:
        """Return which records are in the page cache, bool [n]. Return None if less than half of a sample is cached."""
        # Querying a whole shard is slow (0.1 ms for 50 MB), so a result is reused for some seconds.
        files = self._cached_files.acquire(part)
        try:
            file, middle = next(iter(files.values())), len(part) // 2
            resident = file.resident if _is_recent(file) else None
            expected = resident is not None and resident[part.positions[middle]]
            if resident is not None and expected and self._mostly_cached(file, part.positions[[middle]]):
                return resident[part.positions]
            if not self._mostly_cached(file, part.positions[[0, middle, -1]]):
                return None
            if resident is None or expected:  # not looked up recently, or evicted since
                resident = resident_records(file, self._files.record_bytes)
                file.resident, file.resident_at = resident, time.monotonic()
            return resident[part.positions]
        finally:
            self._cached_files.release(files)

    def _mostly_cached(self, file: ShardFile, positions: NDArray[np.int64]) -> bool:
        return self._mean_share(file, positions) >= _CACHED_SHARE

    def _is_resident(self, shard: int, position: int) -> bool:
        record = Batch(*(np.array([number]) for number in (shard, position, 0)))
        return self._cached_share(record, 0, if_unknown=1.0) >= _CACHED_SHARE


def _is_recent(file: ShardFile) -> bool:
    return time.monotonic() - file.resident_at < _RESIDENCY_TRUSTED_SECONDS
