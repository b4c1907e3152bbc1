"""Reads records of an index on a file system: the engines, and the choice of an engine
for each shard.

- `direct` reads past the page cache, with many requests in flight (`reading.direct`).
  It is fastest for cold records.
- `mapped` copies records from memory maps, without a system call per record. A record
  that is not in the page cache costs one page fault per page, one after the other,
  which reaches a tenth of the speed of the disk.
- `portable` reads through the page cache with several threads, on any file system and
  any POSIX system.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError, cannot_read
from storage_formats.reading.batch import PIECE_RECORDS, Batch
from storage_formats.reading.destination import Destination
from storage_formats.reading.direct import read_direct
from storage_formats.reading.files import (
    TRUSTED_SECONDS,
    ShardFile,
    ShardFiles,
    TokenFiles,
)
from storage_formats.reading.memory import BufferPool, memory_at
from storage_formats.reading.queues import QueuePool, can_queue
from storage_formats.system_calls import advise
from storage_formats.threads import run_threads, settle, unsettled

# files that are mapped at the same time
_MAPPED_SHARDS = 64
_THREADS = 16
_CACHED_SHARE = 0.5
_SEARCH_RECORDS = 512
# Linux 5.14
_MADV_POPULATE_READ = 22


def engines() -> tuple[str, ...]:
    """Return the names of the engines that work on this machine."""
    return ("direct", "mapped", "portable") if can_queue() else ("mapped", "portable")


class LocalReads:
    """Reads the records of one precision. Thread-safe.

    The choice of `auto`: shards in the page cache are read by `mapped`, others by
    `direct`, which does not fill the page cache. If all records fit in half of the free
    memory, at most 512 records, for example the candidates of a search, are read into
    the page cache instead: the kernel starts all reads, then `mapped` copies the
    records.

    Args:
        name: one of `engines()`, or `auto`.

    Raises:
        UsageError: the engine `name` is unknown or does not work on this machine.
    """

    def __init__(self, tokens: TokenFiles, name: str) -> None:
        if name not in ("auto", *engines()):
            choices = ", ".join(("auto", *engines()))
            raise UsageError(
                f"the read engine '{name}' is unknown or does not work on this machine;"
                f" choose one of: {choices}"
            )
        record_bytes = tokens.codec.record_bytes
        self._path = tokens.path
        self._record_bytes = record_bytes
        self._name = name
        self._buffers = BufferPool()
        self._index_bytes = tokens.index.manifest.spec.used_rows * record_bytes
        self._cached_files = ShardFiles(tokens.path, record_bytes)
        self._direct_files = ShardFiles(tokens.path, record_bytes, direct=can_queue())
        self._queues = QueuePool()
        # shard and position of records that `_load` has read
        self._loaded: set[tuple[int, int]] = set()
        self._loaded_until = 0.0

    def length(self, shard: int) -> int:
        """Return the length of the token file of a shard in bytes. Raise
        CorruptIndexError if it does not exist.
        """
        try:
            return self._path(shard).stat().st_size
        except OSError as error:
            raise cannot_read(error.filename, error) from error

    def read(self, destination: Destination) -> None:
        """Read the records of `destination.batch`. Afterwards, nothing writes to the
        destination any more.
        """
        settle(unsettled())
        for engine, batch in self.split(destination.batch):
            part = replace(destination, batch=batch)
            if engine == "direct":
                read_direct(part, self._direct_files, self._queues, self._buffers)
            elif engine == "mapped":
                self._read_mapped(part)
            else:
                self._read_portable(part)

    def _read_mapped(self, destination: Destination) -> None:
        spans = destination.batch.shard_spans
        size = self._record_bytes
        files_of_store = self._direct_files
        for first in range(0, len(spans), _MAPPED_SHARDS):
            group = spans[first : first + _MAPPED_SHARDS]
            part = slice(group[0][1], group[-1][2])
            batch = destination.batch[part]
            files = files_of_store.acquire(batch)
            try:
                try:
                    addresses = [file.mapped_at() for file in files.values()]
                except OSError:
                    # a file system without memory maps
                    self._read_portable(destination)
                    return
                start = min(addresses)
                stop = max(
                    address + file.size
                    for address, file in zip(addresses, files.values(), strict=True)
                )
                offsets = batch.per_record(addresses) + batch.positions * size - start
                destination.take(memory_at(start, stop - start), offsets, part)
            finally:
                files_of_store.release(files)

    def _read_portable(self, destination: Destination) -> None:
        size = self._record_bytes

        def read_run(request: tuple[ShardFile, int, memoryview]) -> None:
            file, position, target = request
            file.read_fully(file.fd, position, target, size)

        for piece in destination.batch.pieces(4 * PIECE_RECORDS):
            batch = destination.batch[piece]
            files = self._cached_files.acquire(batch)
            buffer = self._buffers.borrow(len(batch) * size)
            try:
                # a contiguous array is a buffer
                memory = memoryview(buffer)  # type: ignore[arg-type]
                requests = [
                    (files[shard], position, memory[start * size : stop * size])
                    for shard, position, start, stop in batch.run_list(size)
                ]
                for file, position, target in requests:
                    advise(file.fd, position * size, len(target))
                run_threads(read_run, requests, min(_THREADS, len(requests)))
                destination.take(buffer, np.arange(len(batch)) * size, piece)
            finally:
                self._cached_files.release(files)
            self._buffers.give_back(buffer)

    def split(self, batch: Batch) -> list[tuple[str, Batch]]:
        """Choose an engine for each shard of `batch`. Return each engine with the
        part of `batch` to read with it.
        """
        if self._name != "auto":
            return [(self._name, batch)]
        is_cached = self._cached_records(batch)
        # one of the records tells whether the kernel has dropped them since
        if is_cached.any():
            probe = batch[is_cached][-1:]
            start = int(probe.positions[0]) * self._record_bytes
            with self._held(int(probe.shards[0])) as file:
                share = file.cached_share(
                    start, min(file.size, start + self._record_bytes)
                )
            if share is not None and share < _CACHED_SHARE:
                is_cached = self._cached_records(batch, trusted=False)
        if is_cached.all():
            return [("mapped", batch)]
        if len(batch) <= _SEARCH_RECORDS and self._fits_in_cache:
            if self._load(batch[~is_cached]):
                return [("mapped", batch)]
            # a kernel before 5.14, or a disk error, which the other engines report
            self._fits_in_cache = False
        uncached = "direct" if self._direct_files.is_direct else "portable"
        parts = ("mapped", batch[is_cached]), (uncached, batch[~is_cached])
        return [(engine, part) for engine, part in parts if len(part)]

    def close(self) -> None:
        """Close all files, and free idle queues and buffers. The store can still be
        used.
        """
        self._queues.close()
        self._cached_files.close()
        self._direct_files.close()
        self._buffers.close()

    def _cached_records(
        self, batch: Batch, *, trusted: bool = True
    ) -> NDArray[np.bool_]:
        """Return whether the page cache has each record, bool [n].

        Shards that the kernel was asked about in the last two seconds, and candidates
        read since then, are trusted.
        """
        now = time.monotonic()
        if not trusted or now >= self._loaded_until:
            self._loaded = set()
            self._loaded_until = now + TRUSTED_SECONDS
        states: list[int] = []
        for shard, _, _ in batch.shard_spans:
            file = self._direct_files.peek(shard)
            if file is None or not trusted or now >= file.trusted_until:
                with self._held(shard) as file:
                    file.ask(now)
            states.append(bool(file.is_cached))
        is_cached: NDArray[np.bool_] = batch.per_record(states) == 1
        if self._loaded and len(batch) <= _SEARCH_RECORDS and not all(states):
            is_cached |= [record in self._loaded for record in _records(batch)]
        return is_cached

    @functools.cached_property
    def _fits_in_cache(self) -> bool:
        return self._index_bytes <= cache_room()

    def _load(self, batch: Batch) -> bool:
        """Read the records of `batch` into the page cache, and map them. Return False
        if the kernel cannot do that.

        Afterwards, `mapped` needs no page faults, which would kill the process (SIGBUS)
        if the disk failed.
        """
        size = self._record_bytes
        files = self._direct_files.acquire(batch)
        try:
            addresses = {shard: file.mapped_at() for shard, file in files.items()}
            pages = []
            for shard, position, start, stop in batch.run_list(size):
                first = position * size
                before = first % mmap.PAGESIZE
                length = before + (stop - start) * size
                pages.append((shard, first - before, length))
            # all reads start before this thread waits for one
            for shard, offset, length in pages:
                advise(files[shard].fd, offset, length)
            madvise = _madvise()
            if any(
                madvise(addresses[shard] + offset, length, _MADV_POPULATE_READ)
                for shard, offset, length in pages
            ):
                return False
            self._loaded.update(_records(batch))
            return True
        except OSError:
            # a file system without memory maps
            return False
        finally:
            self._direct_files.release(files)

    @contextlib.contextmanager
    def _held(self, shard: int) -> Iterator[ShardFile]:
        file = self._direct_files.get(shard)
        try:
            yield file
        finally:
            self._direct_files.release({shard: file})


def _records(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.shards.tolist(), batch.positions.tolist(), strict=True))


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def cache_room() -> int:
    """Return how many bytes of shards the page cache may take without displacing other
    data.

    The result is half of the available memory, and at most half of the memory limit of
    the control group. It is 0 if the operating system does not report the available
    memory.
    """
    # importing psutil would take 15 ms
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits = [
            int(line.split()[1]) << 10
            for line in lines
            if line.startswith("MemAvailable:")
        ]
        groups = [
            line.split(":", 2)
            for line in Path("/proc/self/cgroup").read_text().splitlines()
        ]
    except OSError:
        # not Linux
        return 0
    # version 2 has one group without controllers
    for _, controllers, path in groups:
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            folder = root / path.lstrip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            while folder.is_relative_to(root):
                # the root group has no such file; it may contain "max"
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((folder / name).read_text()))
                folder = folder.parent
    return min(limits, default=0) // 2
