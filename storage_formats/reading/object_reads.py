"""The engine `object-store`, which reads byte ranges of objects with many requests in flight.

Blocks that are cached on the local disk are read from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.layout import IndexSpec, padded_shard_bytes
from storage_formats.format.object_store import ObjectFolder
from storage_formats.reading.batch import Batch, Ints, Part
from storage_formats.reading.block_cache import BlockCache
from storage_formats.reading.destination import Destination
from storage_formats.reading.memory import BufferPool, Bytes
from storage_formats.threads import Crew, settle, unsettled

OBJECT_STORE = "object-store"

_PIECE_RECORDS = 512
_PIECES_IN_FLIGHT = 2
_REQUESTS = 32  # in flight for each piece
_RUN_BYTES = 4 << 20
_GAP_BYTES = 64 << 10


@dataclass(frozen=True)
class ObjectReads:
    """Reads the token objects of one precision. Thread-safe. Has the methods of `local_reads.LocalReads`.

    Attributes:
        folder: objects of the index.
        key: function that takes a shard number and returns the key of the token object.
        record_bytes: length of a record in bytes.
        cache: cached blocks on the local disk; None reads all blocks from the object store.
        buffers: pool of buffers for records.
    """

    folder: ObjectFolder
    key: Callable[[int], str]
    record_bytes: int
    cache: BlockCache | None
    buffers: BufferPool

    @staticmethod
    def check_engine(name: str) -> None:
        """Raise UsageError if `name` is the name of an engine for files."""
        if name not in ("auto", OBJECT_STORE):
            raise UsageError(
                f"the read engine '{name}' cannot read an index on an object store; choose auto or {OBJECT_STORE}"
            )

    def check_lengths(self, spec: IndexSpec) -> None:
        """Check the lengths of the first and the last token object.

        Raises:
            CorruptIndexError: an object is missing or has a wrong length.
        """
        for shard in {spec.used_segments[0].first_row // spec.shard_size, spec.shards - 1}:
            self.check_length(spec, shard)

    def check_length(self, spec: IndexSpec, shard: int) -> None:
        """Check the length of the token object of a shard. Raises the same error as `check_lengths`."""
        _, length = padded_shard_bytes(len(spec.shard_rows(shard)), spec.shard_size, self.record_bytes)
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

    def read(self, batch: Batch, destination_of: Callable[[Batch], Destination]) -> None:
        """Read the records of `batch`, see `local_reads.LocalReads.read`. Raises the errors of `read_into`."""
        self.read_into(destination_of(batch))

    def read_into(self, destination: Destination) -> None:
        """Read all records of `destination.batch`. Afterwards, nothing writes to the destination any more.

        Raises:
            CorruptIndexError: an object is missing or a record is damaged.
            ObjectStoreError: the object store refused a request or cannot be reached.
        """
        batch = destination.batch
        crews: deque[tuple[Crew[_Request], Bytes, Ints, Part]] = deque()

        def abandon() -> None:
            for crew, *_ in crews:
                crew.abandon()

        def finish() -> None:
            crew, buffer, offsets, part = crews[0]
            crew.finish()
            crews.popleft()
            # With requests of the next piece in flight, which need the processor too, one thread decodes.
            destination.take(buffer, offsets, part, threads=1 if crews else None)
            self.buffers.give_back(buffer)

        pending = unsettled()
        settle(pending)
        try:
            for piece in batch.pieces(_PIECE_RECORDS):
                if len(crews) == _PIECES_IN_FLIGHT:
                    finish()
                part = np.arange(piece.start, piece.stop)
                names = {}
                if self.cache:
                    names = self.cache.names(batch[piece])
                    part = part[~self.cache.read(batch[piece], names, destination, piece.start)]
                if len(part):
                    requests, buffer, offsets = self._requests(batch[part], names)
                    crews.append((Crew(self._read, requests), buffer, offsets, part))
                    crews[-1][0].start(min(_REQUESTS, len(requests)))
            while crews:
                finish()
        except BaseException:
            pending.append(abandon)
            settle(pending)
            raise

    def close(self) -> None:
        """Free the idle buffers."""
        self.buffers.close()

    def _requests(self, batch: Batch, names: dict[int, str]) -> tuple[list[_Request], Bytes, Ints]:
        """Return requests for the records of `batch`, the buffer for them, and the offset of each record in it."""
        size = self.record_bytes
        first, count = batch.runs(size, gap=_GAP_BYTES // size, longest_bytes=_RUN_BYTES)
        starts, stops = batch.positions[first], batch.positions[first + count - 1] + 1
        at = np.cumsum(stops - starts) - (stops - starts)
        buffer = self.buffers.borrow(int((stops - starts).sum()) * size)
        columns = (batch.shards[first], starts, stops, at)
        requests = [
            _Request(shard, start, stop, buffer[offset * size : (offset + stop - start) * size], names.get(shard))
            for shard, start, stop, offset in zip(*(column.tolist() for column in columns), strict=True)
        ]
        return requests, buffer, (np.repeat(at - starts, count) + batch.positions) * size

    def _read(self, request: _Request) -> None:
        size = self.record_bytes
        try:
            data = self.folder.read_range(self.key(request.shard), request.start * size, request.stop * size)
        except (FileNotFoundError, EOFError) as error:
            raise CorruptIndexError(
                f"{self.url(request.shard)} is missing, or ends before the record at position "
                f"{request.stop - 1}; a later change of the index may have removed it. Call refresh(), or open "
                "the index again. If the error remains, copy the index again from a sound copy"
            ) from error
        request.target[:] = np.frombuffer(data, dtype=np.uint8)
        if self.cache and request.cached_file:
            self.cache.write(request.cached_file, request.start, data)


@dataclass(frozen=True)
class _Request:
    """A request for the records at the positions [start, stop) of a shard, which are written to `target`.

    `cached_file` is the name of the file of the block cache that stores the records; None if there is no cache.
    """

    shard: int
    start: int
    stop: int
    target: Bytes
    cached_file: str | None
