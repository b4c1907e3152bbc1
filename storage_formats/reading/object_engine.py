"""The engine `object-store`, which reads byte ranges of objects with many requests in flight.

Blocks that are cached on the local disk are read from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from storage_formats.codecs import Records
from storage_formats.crew import Crew
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.layout import IndexSpec, padded_shard_bytes
from storage_formats.format.object_store import ObjectFolder
from storage_formats.reading.base import EVERY_RECORD, Batch, Destination, Finish, ReadEngine, Reader, Runs
from storage_formats.reading.block_cache import BlockCache
from storage_formats.reading.memory import BufferPool

OBJECT_STORE = "object-store"

_PIECE_RECORDS = 512
_PIECES_IN_FLIGHT = 2
_REQUESTS = 32  # in flight for each piece
_RUN_BYTES = 4 << 20
_GAP_BYTES = 64 << 10
_DECODE_THREADS = 1  # while requests of the next piece are in flight, which need the processor too


@dataclass(frozen=True)
class RemoteFiles:
    """The token objects of one precision.

    Attributes:
        folder: objects of the index.
        key: function that takes a shard number and returns the key of the token object.
        record_bytes: length of a record in bytes.
        spec: shape of the index.
        cache: cached blocks on the local disk; None reads all blocks from the object store.
    """

    folder: ObjectFolder
    key: Callable[[int], str]
    record_bytes: int
    spec: IndexSpec
    cache: BlockCache | None = None

    def check_lengths(self) -> None:
        """Check the lengths of the first and the last token object.

        Raises:
            CorruptIndexError: an object is missing or has a wrong length.
        """
        for shard in {self.spec.used_segments[0].first_row // self.spec.shard_size, self.spec.shards - 1}:
            self.check_length(shard)

    def check_length(self, shard: int) -> None:
        """Check the length of the token object of a shard. Raises the same error as `check_lengths`."""
        _, length = padded_shard_bytes(len(self.spec.shard_rows(shard)), self.spec.shard_size, self.record_bytes)
        info = self.folder.info(self.key(shard))
        if info is None or info.size != length:
            actual = "does not exist" if info is None else f"has {info.size} bytes"
            raise CorruptIndexError(
                f"the token object {self.url(shard)} {actual}, but should have {length} bytes; copy the index "
                "again from a sound copy"
            )

    def url(self, shard: int) -> str:
        """Return the URL of the token object of a shard."""
        return self.folder.url_of(self.key(shard))


class RemoteEngines:
    """The read engine for an index on an object store. Thread-safe.

    This class has the same methods as `engine_selection.ReadEngines`.

    Args:
        files: token objects of the store.
        name: `object-store` or `auto`.

    Raises:
        UsageError: `name` is the name of another engine.
    """

    def __init__(self, files: RemoteFiles, name: str) -> None:
        if name not in ("auto", OBJECT_STORE):
            raise UsageError(
                f"the read engine '{name}' cannot read an index on an object store; choose auto or {OBJECT_STORE}"
            )
        self.buffers = BufferPool()
        self._engine = ObjectStoreEngine(files)

    def split(self, batch: Batch) -> list[tuple[ReadEngine, Batch]]:
        return [(self._engine, batch)]

    def announce(self, batch: Batch) -> None:
        """Do nothing, because object stores have no page cache."""

    def close(self) -> None:
        self.buffers.close()


@dataclass(frozen=True)
class _Request:
    """A request to read neighbouring records of one object.

    Attributes:
        shard: shard number.
        positions: positions of the records in the shard, ascending.
        record_indices: index of each record in the array `records` of the destination.
        cached_file: name of the file of the block cache that stores the records; None if there is no cache.
    """

    shard: int
    positions: list[int]
    record_indices: list[int]
    cached_file: str | None


class ObjectStoreEngine:
    """Reads ranges of objects on several threads. See `base.ReadEngine`."""

    name = OBJECT_STORE

    def __init__(self, files: RemoteFiles) -> None:
        self._files = files

    def reader(self) -> Reader:
        return _ObjectReader(self._files)

    def close(self) -> None:
        """Do nothing, because idle readers have no resources."""


class _ObjectReader:
    ahead = _PIECES_IN_FLIGHT
    piece_records = _PIECE_RECORDS

    def __init__(self, files: RemoteFiles) -> None:
        self._files = files
        self._crews: list[Crew[_Request]] = []

    def start(self, batch: Batch, destination: Destination) -> Finish:
        requests = self._requests(batch, destination)
        if not requests:
            return functools.partial(destination.finish, EVERY_RECORD, None)
        records = destination.records  # allocated here, because several threads could each allocate their own
        crew = Crew(lambda request: self._read(request, records), requests)
        self._crews.append(crew)
        crew.start(min(_REQUESTS, len(requests)))

        def finish() -> None:
            crew.finish()
            self._crews.remove(crew)
            destination.finish(EVERY_RECORD, _DECODE_THREADS if self._crews else None)

        return finish

    def close(self) -> None:
        """Do nothing, because a reader has no resources."""

    def abandon(self) -> None:
        for crew in self._crews:
            crew.abandon()

    def _requests(self, batch: Batch, destination: Destination) -> list[_Request]:
        """Read the cached records of `batch`, and return requests for the other records."""
        size, cache, record_indices = self._files.record_bytes, self._files.cache, destination.record_indices
        names = cache.names(batch) if cache else {}
        if cache:
            is_missing = ~cache.read(batch, names, destination)
            batch, record_indices = batch[is_missing], record_indices[is_missing]
            if not len(batch):
                return []
        runs = Runs.of(batch, size, gap=_GAP_BYTES // size, longest_bytes=_RUN_BYTES)
        positions, indices = batch.positions.tolist(), record_indices.tolist()
        return [
            _Request(shard, positions[first : first + count], indices[first : first + count], names.get(shard))
            for shard, first, count in zip(
                batch.shards[runs.first].tolist(), runs.first.tolist(), runs.count.tolist(), strict=True
            )
        ]

    def _read(self, request: _Request, records: Records) -> None:
        size, start = self._files.record_bytes, request.positions[0]
        key = self._files.key(request.shard)
        try:
            data = self._files.folder.read_range(key, start * size, (request.positions[-1] + 1) * size)
        except (FileNotFoundError, EOFError) as error:
            raise CorruptIndexError(
                f"{self._files.url(request.shard)} is missing, or ends before the record at position "
                f"{request.positions[-1]}; a later change of the index may have removed it. Call refresh(), or open "
                "the index again. If the error remains, copy the index again from a sound copy"
            ) from error
        stored = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
        for position, index in zip(request.positions, request.record_indices, strict=True):
            records[index] = stored[position - start]
        if self._files.cache and request.cached_file:
            self._files.cache.write(request.cached_file, start, data)
