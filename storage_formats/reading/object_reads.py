"""The engine `object-store`, which reads byte ranges of objects with many requests in
flight.

Blocks that are in the block cache on the local disk are read from the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from storage_formats.errors import CorruptIndexError
from storage_formats.reading.batch import Ints
from storage_formats.reading.block_cache import BlockCache, cache_bytes
from storage_formats.reading.checksums import StoredRecords
from storage_formats.reading.memory import Bytes
from storage_formats.reading.request import ReadRequest
from storage_formats.reading.sinks import Sink
from storage_formats.remote.objects import ObjectFolder
from storage_formats.threads import run_apart

OBJECT_STORE = "object-store"

_PIECE_RECORDS = 512
_PIECES_IN_FLIGHT = 2
# maximum number of requests in flight for each piece
_REQUESTS = 32
# With these sizes, the first search of 200 photos takes 14 requests (29 with 4 MiB and
# 64 KiB), and fetches from a server on the same machine are no slower.
_RUN_BYTES = 1 << 20
_GAP_BYTES = 256 << 10


class ObjectReads:
    """Reads the token objects of one precision, and keeps the blocks in the block
    cache. Thread-safe. The methods `length`, `read` and `close` have the same meaning
    as in `local_reads.LocalReads`.
    """

    def __init__(self, folder: ObjectFolder, records: StoredRecords) -> None:
        self._folder = folder
        self._file = records.file
        self._size = records.record_bytes
        self._cache: BlockCache | None = None
        if limit := cache_bytes():
            self._cache = BlockCache(folder.url, records, limit)

    def length(self, shard: int) -> int:
        """Return the length of the token object of a shard in bytes; 0 if it does
        not exist.
        """
        info = self._folder.info(self._file.format(shard))
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
        size = self._size
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

        try:
            for piece in request.batch.pieces(_PIECE_RECORDS):
                if len(pieces) == _PIECES_IN_FLIGHT:
                    yield from finish()
                part = np.arange(piece.start, piece.stop)
                if self._cache:
                    part = part[~self._cache.read(request, piece)]
                if not len(part):
                    continue
                missing = request.batch[part]
                ranges, sources, buffer = missing.ranges(
                    size, gap=_GAP_BYTES // size, longest_bytes=_RUN_BYTES
                )
                futures = [threads.submit(self._read_range, *each) for each in ranges]
                pieces.append((futures, buffer, sources, part))
            while pieces:
                yield from finish()
        finally:
            threads.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Do nothing, because no file is open."""

    def _read_range(self, shard: int, start: int, target: memoryview) -> None:
        stop = start + len(target)
        key = self._file.format(shard)
        try:
            data = self._folder.read_range(key, start, stop)
        except (FileNotFoundError, EOFError) as error:
            raise CorruptIndexError(
                f"{self._folder.url_of(key)} is missing, or ends before byte {stop}; a"
                " later change of the index may have removed it. Call refresh(), or"
                " open the index again. If the error remains, copy the index again from"
                " a sound copy"
            ) from error
        target[:] = data
        if self._cache:
            self._cache.write(shard, start, data)
