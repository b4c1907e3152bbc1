"""Reads records of an index on a file system: the engines, and the choice of an engine
for each shard.

- `direct` reads past the page cache, with many requests in flight (`reading.direct`).
  This engine is the fastest for records that are not in the page cache.
- `mapped` copies records from memory maps, without a system call per record. This
  engine is the fastest for records in the page cache. If a record is not there, the
  thread waits for one page fault per page, one after the other, and the disk reaches a
  tenth of its speed.
- `portable` reads through the page cache, on any file system and any POSIX system. It
  asks the kernel for many records before it waits for the first. Where the kernel
  cannot be asked in advance, several threads read at the same time.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from storage_formats.cgroups import available_memory
from storage_formats.errors import UsageError, cannot_read
from storage_formats.format.index_files import IndexFile
from storage_formats.reading.batch import PIECE_RECORDS, Batch, Ints
from storage_formats.reading.checksums import StoredRecords
from storage_formats.reading.direct import read_direct
from storage_formats.reading.files import (
    ShardFiles,
    iter_ranges,
    open_files,
)
from storage_formats.reading.mapped import MAPPED_SHARDS, MappedShards
from storage_formats.reading.queues import RequestError, can_queue
from storage_formats.reading.request import ReadRequest
from storage_formats.reading.sinks import Sink
from storage_formats.system_calls import advise
from storage_formats.threads import run_apart

# A request for at most this number of records may come from a search.
_SEARCH_RECORDS = 512


def engines() -> tuple[str, ...]:
    """Return the names of the engines that work on this machine."""
    return ("direct", "mapped", "portable") if can_queue() else ("mapped", "portable")


class LocalReads:
    """Reads the records of one precision. Thread-safe.

    `auto` chooses an engine for each shard:

    - `mapped` reads shards that are in the page cache.
    - `portable` reads the other shards of a request for at most 512 records, for
      example for the candidates of a search. This engine leaves the records in the page
      cache for later searches.
    - `direct` reads the other shards of a larger request, and does not fill the page
      cache. If direct I/O is not available, `portable` reads them. `portable` also
      reads a shard, and the kernel loads the whole shard into the page cache, if as
      many bytes as the shard has were read from it before and half of the available
      memory has room. So data that is read again and again is soon read from memory,
      and one pass over an index leaves the page cache as it is.

    If the index has more shards than files may be open, `portable` reads every request
    for at most 512 records. The files of such a request are often not open, and opening
    and mapping a file takes as long as reading several records.

    Args:
        name: one of `engines()`, or `auto`.

    Raises:
        UsageError: the engine `name` is unknown or does not work on this machine.
    """

    def __init__(self, records: StoredRecords, name: str) -> None:
        if name not in ("auto", *engines()):
            choices = ", ".join(("auto", *engines()))
            raise UsageError(
                f"the read engine '{name}' is unknown or does not work on this machine;"
                f" choose one of: {choices}"
            )
        self._records = records
        root = records.index.root
        self._record_bytes = records.record_bytes
        self._name = name
        self._spec = records.index.manifest.spec
        self._is_wide = self._spec.used_shards > open_files()
        self._files = ShardFiles(root, records.file)
        self._direct_files = ShardFiles(root, records.file, direct=can_queue())
        # by shard number: bytes of records that were requested past the page cache
        self._direct_bytes: dict[int, int] = {}
        # by shard number: bytes that the page cache was asked to load
        self._loaded_bytes: dict[int, int] = {}

    def length(self, shard: int) -> int:
        """Return the length of the token file of a shard in bytes. Raise
        CorruptIndexError if the file does not exist.
        """
        path = self._records.location(shard)
        try:
            with IndexFile(self._records.index.root, path) as file:
                return os.fstat(file.fileno()).st_size
        except OSError as error:
            raise cannot_read(path, error) from error

    @cached_property
    def _mapped(self) -> MappedShards:
        is_trusted = self._name == "mapped"
        return MappedShards(self._records, self._files, is_trusted=is_trusted)

    def read_cached(self, row_ids: Ints, sink: Sink) -> bool:
        """Write the records of `row_ids` [k] to the sink if this is possible without a
        request for any file. Return whether the records were written.
        """
        if self._is_wide or self._name not in ("auto", "mapped"):
            return False
        return self._mapped.read_cached(row_ids, sink)

    def read(self, request: ReadRequest) -> None:
        """Read the records of a request. After this method returns or raises an
        exception, no thread and no request of the kernel writes to the sink.
        """
        for engine, batch in self.split(request.batch):
            part = replace(request, batch=batch)
            try:
                if engine == "direct":
                    files = self._direct_files
                    run_apart(read_direct(part, files))
                elif engine == "mapped":
                    self._mapped.read(part)
                else:
                    self._read_portable(part)
            except RequestError:
                # Either the kernel has no queue left (fs.aio-max-nr limits those of all
                # processes together), or the file system does not support the requests
                # or memory maps, or the file is damaged. In the last case, `portable`
                # raises an error that describes the damage.
                self._read_portable(part)

    def _read_portable(self, request: ReadRequest) -> None:
        size = self._record_bytes
        for piece in request.batch.pieces(4 * PIECE_RECORDS):
            batch = request.batch[piece]
            files = self._files.acquire_for(batch, size)
            ranges, sources, buffer = batch.ranges(size)
            requests = [
                (files[shard], offset, target) for shard, offset, target in ranges
            ]
            first = 0
            try:
                for part in iter_ranges(requests):
                    read_bytes = sum(len(target) for *_, target in requests[part])
                    last = first + read_bytes // size
                    records = slice(piece.start + first, piece.start + last)
                    request.take(sources[first:last], records, buffer)
                    first = last
            finally:
                self._files.release(files)

    def split(self, batch: Batch) -> list[tuple[str, Batch]]:
        """Choose an engine for each shard of `batch`. Return each engine with the
        part of `batch` to read with it.
        """
        if self._name != "auto":
            return [(self._name, batch)]
        is_small = len(batch) <= _SEARCH_RECORDS
        if is_small and self._is_wide:
            return [("portable", batch)]
        is_cached = self._are_cached(batch)
        if is_cached.all():
            return [("mapped", batch)]
        parts = [("mapped", batch[is_cached])]
        uncached = batch[~is_cached]
        if self._direct_files.is_direct and not is_small:
            is_admitted = self._admit(uncached)
            parts.append(("direct", uncached[~is_admitted]))
            uncached = uncached[is_admitted]
        parts.append(("portable", uncached))
        return [(engine, part) for engine, part in parts if len(part)]

    def _admit(self, batch: Batch) -> NDArray[np.bool_]:
        """Return whether each record is to be read through the page cache because much
        of its shard was read before, bool [n].
        """
        admitted: list[int] = []
        for shard, start, stop in batch.shard_spans:
            length = len(self._spec.shard_rows(shard)) * self._record_bytes
            earlier = self._direct_bytes.get(shard, 0)
            self._direct_bytes[shard] = earlier + (stop - start) * self._record_bytes
            # a shard that has left the page cache may be loaded again
            self._loaded_bytes.pop(shard, None)
            is_admitted = (
                earlier >= length
                and sum(self._loaded_bytes.values()) + length <= available_memory() // 2
            )
            if is_admitted:
                self._loaded_bytes[shard] = length
                self._direct_bytes[shard] = 0
                files = self._files.acquire([shard])
                advise(files[shard].fd, 0, files[shard].size)
                # the next read asks whether the page cache has the file by then
                files[shard].trusted_until = 0.0
                self._files.release(files)
            admitted.append(is_admitted)
        records: NDArray[np.bool_] = batch.per_record(admitted) == 1
        return records

    def close(self) -> None:
        """Close all files. A later read opens the
        files again.
        """
        # the maps are freed with the last read that uses them
        vars(self).pop("_mapped", None)
        self._files.close()
        self._direct_files.close()

    def _are_cached(self, batch: Batch) -> NDArray[np.bool_]:
        """Return whether the page cache holds the shard of each record, bool [n]. The
        kernel is asked about a shard at most once in two seconds, unless records of the
        batch have left the page cache meanwhile.
        """
        now = time.monotonic()
        was_evicted = self._mapped.was_evicted(batch.shards, batch.positions)
        shards = [shard for shard, _, _ in batch.shard_spans]
        states: list[int] = []
        for first in range(0, len(shards), MAPPED_SHARDS):
            held = self._files.acquire(shards[first : first + MAPPED_SHARDS])
            try:
                for file in held.values():
                    if was_evicted or now >= file.trusted_until:
                        file.ask(now)
                    states.append(bool(file.is_cached))
            finally:
                self._files.release(held)
        is_cached: NDArray[np.bool_] = batch.per_record(states) == 1
        return is_cached
