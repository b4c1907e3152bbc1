"""The engine `object-store`, which reads byte ranges of objects with many requests in
flight.

Blocks that are in the block cache on the local disk are read from the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from storage_formats.errors import CorruptIndexError
from storage_formats.reading.batch import Ints
from storage_formats.reading.block_cache import BlockCache
from storage_formats.reading.files import TokenFiles
from storage_formats.reading.memory import BufferPool, Bytes
from storage_formats.reading.request import ReadRequest
from storage_formats.reading.sinks import Sink
from storage_formats.remote.objects import ObjectFolder
from storage_formats.threads import run_apart

OBJECT_STORE = "object-store"

_PIECE_RECORDS = 512
_PIECES_IN_FLIGHT = 2
# maximum number of requests in flight for each piece
_REQUESTS = 32
_RUN_BYTES = 4 << 20
_GAP_BYTES = 64 << 10


_Range: TypeAlias = tuple[int, int, int, Bytes, str | None]
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

    def read_cached(self, row_ids: Ints, sink: Sink) -> bool:
        """Return False: every read compares checksums, see `LocalReads.read_cached`."""
        return False

    def read(self, request: ReadRequest) -> None:
        """Read the records of a request, see `LocalReads.read`."""
        run_apart(self._read_pieces(request))

    def _read_pieces(self, request: ReadRequest) -> Generator[None, None, None]:
        """Read the records of a request. Yield after each part of the work. After the
        generator ends or is closed, no request writes to the sink.
        """
        size = self.tokens.codec.record_bytes
        pieces: deque[tuple[list[Future[None]], Bytes, Ints, Ints]] = deque()
        threads = ThreadPoolExecutor(_PIECES_IN_FLIGHT * _REQUESTS)

        def finish() -> Generator[None, None, None]:
            futures, buffer, sources, part = pieces.popleft()
            for future in futures:
                future.result()
                yield
            # The requests of the next piece need the processor too, so only one thread
            # decodes while they are in flight.
            request.take(sources, part, buffer, threads=1 if pieces else None)
            self.buffers.give_back(buffer)

        try:
            for piece in request.batch.pieces(_PIECE_RECORDS):
                if len(pieces) == _PIECES_IN_FLIGHT:
                    yield from finish()
                part = np.arange(piece.start, piece.stop)
                names = {}
                if self.cache:
                    batch = request.batch[piece]
                    names = self.cache.names(batch)
                    part = part[~self.cache.read(batch, names, request, piece.start)]
                if not len(part):
                    continue
                missing = request.batch[part]
                ranges, indices = missing.ranges(
                    size, gap=_GAP_BYTES // size, longest_bytes=_RUN_BYTES
                )
                buffer = self.buffers.borrow(ranges[-1][-1] * size)
                futures = []
                for shard, position, start, stop in ranges:
                    target = buffer[start * size : stop * size]
                    last = position + stop - start
                    object_range = (shard, position, last, target, names.get(shard))
                    futures.append(threads.submit(self._read_range, object_range))
                sources = buffer.ctypes.data + indices * size
                pieces.append((futures, buffer, sources, part))
            while pieces:
                yield from finish()
        finally:
            threads.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Free the idle buffers."""
        self.buffers.close()

    def _read_range(self, object_range: _Range) -> None:
        shard, start, stop, target, cached_file = object_range
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
