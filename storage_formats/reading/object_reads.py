"""The engine `object-store`, which reads byte ranges of objects with many requests in
flight.

Blocks that are in the block cache on the local disk are read from the cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from storage_formats.errors import CorruptIndexError
from storage_formats.reading.batch import Ints, Part
from storage_formats.reading.block_cache import BlockCache
from storage_formats.reading.destination import Destination
from storage_formats.reading.files import TokenFiles
from storage_formats.reading.memory import BufferPool, Bytes
from storage_formats.remote.objects import ObjectFolder
from storage_formats.threads import Crew, settle, unsettled

OBJECT_STORE = "object-store"

_PIECE_RECORDS = 512
_PIECES_IN_FLIGHT = 2
# maximum number of requests in flight for each piece
_REQUESTS = 32
_RUN_BYTES = 4 << 20
_GAP_BYTES = 64 << 10


_Request: TypeAlias = tuple[int, int, int, Bytes, str | None]
"""(shard, start, stop, target, cache file): a request for the records at the positions
[start, stop) of a shard. The records are written to `target`. If the name of the cache
file is not None, they are also written to this file of the block cache.
"""


@dataclass(frozen=True)
class ObjectReads:
    """Reads the token objects of one precision. Thread-safe. The methods `length`,
    `read` and `close` have the same meaning as in `local_reads.LocalReads`.

    Attributes:
        cache: block cache on the local disk. If None, all blocks are read from the
            object store.
    """

    folder: ObjectFolder
    tokens: TokenFiles
    cache: BlockCache | None
    buffers: BufferPool

    def length(self, shard: int) -> int:
        """Return the length of the token object of a shard in bytes; 0 if it does
        not exist.
        """
        info = self.folder.info(self.tokens.key(shard))
        return info.size if info else 0

    def read(self, destination: Destination) -> None:
        """Read the records of `destination.batch`, see `LocalReads.read`."""
        batch = destination.batch
        size = self.tokens.codec.record_bytes
        crews: deque[tuple[Crew[_Request], Bytes, Ints, Part]] = deque()

        def abandon() -> None:
            for crew, *_ in crews:
                crew.abandon()

        def finish() -> None:
            crew, buffer, offsets, part = crews[0]
            crew.finish()
            crews.popleft()
            # The requests of the next piece need the processor too, so only one thread
            # decodes while they are in flight.
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
                    part = part[
                        ~self.cache.read(batch[piece], names, destination, piece.start)
                    ]
                if not len(part):
                    continue
                missing = batch[part]
                ranges, indices = missing.ranges(
                    size, gap=_GAP_BYTES // size, longest_bytes=_RUN_BYTES
                )
                buffer = self.buffers.borrow(ranges[-1][-1] * size)
                requests = [
                    (
                        shard,
                        position,
                        position + stop - start,
                        buffer[start * size : stop * size],
                        names.get(shard),
                    )
                    for shard, position, start, stop in ranges
                ]
                crew = Crew(self._read, requests)
                crews.append((crew, buffer, indices * size, part))
                crew.start(min(_REQUESTS, len(requests)))
            while crews:
                finish()
        except BaseException:
            pending.append(abandon)
            settle(pending)
            raise

    def close(self) -> None:
        """Free the idle buffers."""
        self.buffers.close()

    def _read(self, request: _Request) -> None:
        shard, start, stop, target, cached_file = request
        size = self.tokens.codec.record_bytes
        key = self.tokens.key(shard)
        try:
            data = self.folder.read_range(key, start * size, stop * size)
        except (FileNotFoundError, EOFError) as error:
            raise CorruptIndexError(
                f"{self.folder.url_of(key)} is missing, or ends before the"
                f" record at position {stop - 1}; a later change of the index may have"
                " removed it. Call refresh(), or open the index again. If the error"
                " remains, copy the index again from a sound copy"
            ) from error
        target[:] = np.frombuffer(data, dtype=np.uint8)
        if self.cache and cached_file:
            self.cache.write(cached_file, start, data)
