"""Reads records of an index on a file system: the engines, and the choice of an engine for each shard.

- `direct` reads past the page cache, with many requests in flight (`reading.direct`). It is fastest for cold records.
- `mapped` copies records from memory maps, without a system call per record. A record that is not in the page cache
  costs one page fault per page, one after the other, which reaches a tenth of the speed of the disk.
- `portable` reads through the page cache with several threads, on any file system and any POSIX system.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from storage_formats.errors import CorruptIndexError, UsageError, cannot_read
from storage_formats.format.layout import IndexSpec, padded_shard_bytes
from storage_formats.reading.batch import PIECE_RECORDS, Batch
from storage_formats.reading.destination import Destination
from storage_formats.reading.direct import DirectEngine
from storage_formats.reading.files import ShardFile, ShardFiles
from storage_formats.reading.memory import BufferPool, memory_at
from storage_formats.reading.queues import queue_class
from storage_formats.threads import run_threads, settle, unsettled

_MAPPED_SHARDS = 64  # files that are mapped at the same time
_THREADS = 16
_LENGTHS_BEFORE_CACHING = 2
_CACHED_SHARE = 0.5


class Engine(Protocol):
    """A way to read records. Thread-safe."""

    name: str

    def read(self, destination: Destination) -> None:
        """Read all records of `destination.batch`. Afterwards, nothing writes to the destination any more."""
        ...


def engines() -> tuple[str, ...]:
    """Return the names of the engines that work on this machine."""
    return ("direct", "mapped", "portable") if queue_class() else ("mapped", "portable")


class MappedEngine:
    """Passes records from memory maps of the shard files to the destination."""

    name = "mapped"

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    def read(self, destination: Destination) -> None:
        spans, size = destination.batch.shard_spans, self._files.record_bytes
        for first in range(0, len(spans), _MAPPED_SHARDS):
            group = spans[first : first + _MAPPED_SHARDS]
            part = slice(group[0][1], group[-1][2])
            batch = destination.batch[part]
            files = self._files.acquire(batch)
            try:
                addresses = [file.mapped_at() for file in files.values()]
                start = min(addresses)
                stop = max(address + file.size for address, file in zip(addresses, files.values(), strict=True))
                offsets = batch.per_record(addresses) + batch.positions * size - start
                destination.take(memory_at(start, stop - start), offsets, part)
            finally:
                self._files.release(files)


class PortableEngine:
    """Reads records through the page cache with several threads."""

    name = "portable"

    def __init__(self, files: ShardFiles, buffers: BufferPool) -> None:
        self._files = files
        self._buffers = buffers

    def read(self, destination: Destination) -> None:
        size = self._files.record_bytes
        for piece in destination.batch.pieces(4 * PIECE_RECORDS):
            batch = destination.batch[piece]
            files, buffer = self._files.acquire(batch), self._buffers.borrow(len(batch) * size)
            try:
                memory = memoryview(buffer)  # type: ignore[arg-type]  # a contiguous array is a buffer
                requests = [
                    (files[shard], position, memory[first * size : (first + count) * size])
                    for shard, position, first, count in _runs(batch, size)
                ]
                for file, position, target in requests:
                    if hasattr(os, "posix_fadvise"):  # not on macOS
                        os.posix_fadvise(file.fd, position * size, len(target), os.POSIX_FADV_WILLNEED)
                run_threads(lambda request: _read_fully(*request, size), requests, min(_THREADS, len(requests)))
                destination.take(buffer, np.arange(len(batch)) * size, piece)
            finally:
                self._files.release(files)
            self._buffers.give_back(buffer)


def _runs(batch: Batch, record_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    first, count = batch.runs(record_bytes)
    columns = (batch.shards[first], batch.positions[first], first, count)
    return zip(*(column.tolist() for column in columns), strict=True)


def _read_fully(file: ShardFile, position: int, target: memoryview, record_bytes: int) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(file.fd, [target[done:]], position * record_bytes + done)
        except OSError as error:
            raise cannot_read(file.path, error) from error
        if not count:
            raise file.ends_early(position + done // record_bytes)
        done += count


class LocalReads:
    """Reads the records of one precision. Thread-safe.

    The choice of `auto`: a shard in the page cache is read by `mapped`, others by `direct`. Direct reads do not fill
    the page cache, so a shard is read into it after direct reads of twice its length, the ski-rental rule. If the
    kernel drops the shard again, it returns after direct reads of four times its length, and so on. The rule applies if
    the records fit in half of the free memory.

    Args:
        path: function that takes a shard number and returns the path of the token file.
        record_bytes: length of a record in bytes.
        spec: shape of the index.
        name: one of `engines()`, or `auto`.

    Raises:
        UsageError: the engine `name` is unknown or does not work on this machine.
    """

    def __init__(self, path: Callable[[int], Path], record_bytes: int, spec: IndexSpec, name: str) -> None:
        if name not in ("auto", *engines()):
            choices = ", ".join(("auto", *engines()))
            raise UsageError(
                f"the read engine '{name}' is unknown or does not work on this machine; choose one of: {choices}"
            )
        self._path = path
        self._record_bytes = record_bytes
        self._name = name
        self._buffers = BufferPool()
        self._shard_bytes = spec.shard_size * record_bytes
        self._index_bytes = spec.used_rows * record_bytes
        self._cached_files = ShardFiles(path, record_bytes)
        self._direct_files = ShardFiles(path, record_bytes, direct=queue_class() is not None)
        self._direct = DirectEngine(self._direct_files, self._buffers)
        self._portable = PortableEngine(self._cached_files, self._buffers)
        self._mapped = MappedEngine(self._direct_files)
        self._direct_reads: dict[int, tuple[int, int]] = {}
        """(bytes of direct reads, bytes at which the shard is read into the page cache) of each shard"""

    def check_lengths(self, spec: IndexSpec) -> None:
        """Check the lengths of the first and the last token file.

        A reader allocates memory for the sizes in `index.json`, so this check must detect wrong sizes first.

        Raises:
            CorruptIndexError: a file is missing or has a wrong length.
        """
        for shard in {spec.used_segments[0].first_row // spec.shard_size, spec.shards - 1}:
            _, length = padded_shard_bytes(len(spec.shard_rows(shard)), spec.shard_size, self._record_bytes)
            try:
                path = self._path(shard)
                actual = path.stat().st_size
            except OSError as error:
                raise cannot_read(error.filename, error) from error
            if actual != length:
                raise CorruptIndexError(
                    f"the token file {path} has {actual} bytes instead of {length}; run 'edje-index verify'"
                )

    def read(self, batch: Batch, destination_of: Callable[[Batch], Destination]) -> None:
        """Read the records of `batch`. `destination_of` returns the destination of a part of the batch.

        Raises:
            CorruptIndexError: a file is missing or a record is damaged.
        """
        settle(unsettled())
        for engine, part in self.split(batch):
            engine.read(destination_of(part))

    def split(self, batch: Batch) -> list[tuple[Engine, Batch]]:
        """Choose an engine for each shard of `batch`. Return each engine with the part of `batch` to read with it."""
        if self._name != "auto":
            engines: dict[str, Engine] = {"direct": self._direct, "mapped": self._mapped, "portable": self._portable}
            return [(engines[self._name], batch)]
        chosen: list[Engine] = []
        due = None
        for (shard, start, stop), is_cached in zip(batch.shard_spans, self._cached_shards(batch), strict=True):
            read, limit = self._direct_reads.get(shard, (0, _LENGTHS_BEFORE_CACHING * self._shard_bytes))
            is_due = read >= limit
            if is_cached:
                chosen.append(self._mapped)
            elif not self._direct_files.is_direct or (is_due and is_cached is None):
                chosen.append(self._portable)
            else:
                chosen.append(self._direct)
                if self._fits_in_cache:
                    self._direct_reads[shard] = (read + (stop - start) * self._record_bytes, limit)
                    due = shard if is_due else due
        if due is not None:  # one at a time: the kernel takes some milliseconds to start the reads of a shard
            with self._held(due) as file:
                file.announce()
            self._direct_reads[due] = (0, 2 * self._direct_reads[due][1])
        kinds = list(dict.fromkeys(chosen))
        if len(kinds) == 1:
            return [(kinds[0], batch)]
        numbers = batch.per_record([kinds.index(engine) for engine in chosen])
        return [(engine, batch[numbers == number]) for number, engine in enumerate(kinds)]

    def close(self) -> None:
        """Close all files, and free idle queues and buffers. The store can still be used."""
        self._direct.close()
        self._cached_files.close()
        self._direct_files.close()
        self._buffers.close()

    def _cached_shards(self, batch: Batch) -> list[bool | None]:
        """Return for each shard of `batch` whether the page cache has it; None if the kernel does not tell."""
        now = time.monotonic()
        states = [self._is_cached(shard, now) for shard, _, _ in batch.shard_spans]
        if True in states:  # one of the records tells whether the kernel has dropped shards since it was asked
            shard, _, stop = batch.shard_spans[len(states) - 1 - states[::-1].index(True)]
            start = int(batch.positions[stop - 1]) * self._record_bytes
            with self._held(shard) as file:
                share = file.cached_share(start, min(file.size, start + self._record_bytes))
            if share is not None and share < _CACHED_SHARE:
                states = [self._is_cached(shard, now, trusted=False) for shard, _, _ in batch.shard_spans]
        return states

    def _is_cached(self, shard: int, now: float, *, trusted: bool = True) -> bool | None:
        file = self._direct_files.peek(shard)
        if file is None or not trusted or now >= file.trusted_until:
            with self._held(shard) as file:
                file.ask(now)
        return file.is_cached

    @contextlib.contextmanager
    def _held(self, shard: int) -> Iterator[ShardFile]:
        file = self._direct_files.get(shard)
        try:
            yield file
        finally:
            self._direct_files.release({shard: file})

    @functools.cached_property
    def _fits_in_cache(self) -> bool:
        return self._index_bytes <= cache_room()


def cache_room() -> int:
    """Return how many bytes of shards the page cache may take without displacing other data.

    The result is half of the available memory, and at most half of the memory limit of the control group. It is 0 if
    the operating system does not report the available memory.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits = [next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))]
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        folder = Path("/sys/fs/cgroup") / next(line[3:] for line in groups if line.startswith("0::")).lstrip("/")
    except (OSError, StopIteration):
        return 0
    while folder.is_relative_to("/sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError):  # the root group has no such file; other files may contain "max"
            limits.append(int((folder / "memory.max").read_text()))
        folder = folder.parent
    return min(limits) // 2
