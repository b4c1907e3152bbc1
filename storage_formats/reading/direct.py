"""The engine `direct`, which reads with direct I/O through a queue of requests.

Direct I/O bypasses the page cache. It requires offsets, lengths and memory addresses
that are multiples of the sector size. If a record does not start and end at a sector
boundary, or must be decoded, the engine first reads whole sectors into a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.batch import PIECE_RECORDS, Batch, Ints
from storage_formats.reading.destination import Destination
from storage_formats.reading.files import ShardFile, ShardFiles
from storage_formats.reading.memory import BufferPool, Bytes
from storage_formats.reading.queues import QueuePool, RequestError
from storage_formats.threads import settle, unsettled

# Two records with at most this many bytes between them are read with one request,
# because reading the gap costs the device less than another request.
_GAP_BYTES = 32 << 10
# maximum size in bytes of a piece of several records
_PIECE_BYTES = 8 << 20
# No further piece is started while this many bytes are in flight.
_BYTES_IN_FLIGHT = 16 << 20
# The same limit for reads into buffers. It is smaller, so that the buffers stay in the
# processor's cache.
_BUFFERED_IN_FLIGHT = 8 << 20
# Reading into a buffer is faster than reading directly into the destination if the
# buffer needs at most 1/4 as many requests.
_FEWER_REQUESTS = 4
# The records of completed requests are checked and decoded in parts: each time
# `_PART_REQUESTS` requests are complete, or 1 / `_PART_SHARE` of the requests in flight
# if this is more. With small parts, little work is left after the last request.
_PART_REQUESTS = 32
_PART_SHARE = 4
_NO_RESULT = np.iinfo(np.int64).min


def read_direct(
    destination: Destination, files: ShardFiles, queues: QueuePool, buffers: BufferPool
) -> None:
    """Read all records of `destination.batch` with direct I/O, with several pieces in
    flight.

    After this function returns or raises an exception, no read writes to the
    destination.

    Args:
        buffers: pool of buffers for records that cannot be read directly into the
            destination.

    Raises:
        RequestError: the queue or a request was refused, or a request failed or read
            too few bytes.
    """
    pending = unsettled()
    settle(pending)
    reader = _Reader(destination, files, queues, buffers)
    try:
        reader.read()
    except BaseException:
        pending.append(reader.abandon)
        settle(pending)
        raise


@dataclass
class _Flight:
    """A piece that is being read with r requests.

    Attributes:
        start: index in the whole batch of the first record of the piece.
        count: [r], number of records of each request.
        offsets: [r], byte offset in the file of each request.
        needed: [r], number of bytes that each request must read, up to the end of its
            last record.
        memory: memory that the requests write to. Request i writes from the byte
            `memory_offsets[i]` on.
        results: [r], result of each request: number of bytes read, a negative errno, or
            `_NO_RESULT` while the request is in flight.
        processed: bool [r], whether the destination has processed the records of each
            request.
        buffer: buffer from the pool that contains `memory`. None if `memory` belongs to
            the destination.
    """

    batch: Batch
    start: int
    files: dict[int, ShardFile]
    count: Ints
    offsets: Ints
    needed: Ints
    memory: Bytes
    memory_offsets: Ints
    results: Ints
    processed: NDArray[np.bool_]
    buffer: Bytes | None


class _Reader:
    """Reads the records of one destination."""

    def __init__(
        self,
        destination: Destination,
        files: ShardFiles,
        queues: QueuePool,
        buffers: BufferPool,
    ) -> None:
        self._destination = destination
        self._files = files
        self._size = destination.codec.record_bytes
        self._queues = queues
        self._queue = queues.borrow()
        self._holds_queue = True
        self._buffers = buffers
        self._flights: dict[int, _Flight] = {}

    def read(self) -> None:
        length = min(PIECE_RECORDS, max(1, _PIECE_BYTES // self._size))
        for number, piece in enumerate(self._destination.batch.pieces(length)):
            # `_wait` only notes which requests have completed. Their records are
            # processed in the next round, after `_launch` has filled the queue again,
            # so that the disk never waits for the processor.
            while self._is_full():
                self._process()
                self._wait()
            self._launch(number, piece)
        # If the last flight has been processed, no request is in flight. `Queue.wait`
        # then returns at once.
        while self._flights:
            self._process()
            self._wait()
        # This is set before the queue is given back, so that `abandon` never closes a
        # queue that another reader may have borrowed.
        self._holds_queue = False
        self._queues.give_back(self._queue)

    def abandon(self) -> None:
        """Wait until the kernel has completed all requests of this reader, and
        release the files.
        """
        # The exception that ended the read may have come after requests were started
        # and before they were recorded. So the queue is closed, which waits for all
        # requests, and the buffers are not returned to the pool.
        if self._holds_queue:
            self._queue.close()
        while self._flights:
            self._files.release(self._flights.popitem()[1].files)

    def _launch(self, number: int, piece: slice) -> None:
        batch = self._destination.batch[piece]
        records = self._destination.records
        size = self._size
        files = self._files.acquire_for(batch, size)
        sector = self._files.sector
        first, count = batch.runs(size, gap=_GAP_BYTES // size)
        # Records that do not start and end at sector boundaries are read into a buffer,
        # and so are records that need many small requests to be read directly.
        if records is not None and (size % sector or records.ctypes.data % sector):
            records = None
        if records is not None:
            direct_first, direct_count = batch.runs(size, contiguous_output=True)
            if len(direct_first) < _FEWER_REQUESTS * len(first):
                first = direct_first
                count = direct_count
            else:
                records = None
        if records is not None:
            # read directly into the destination
            offsets = batch.positions[first] * size
            lengths = count * size
            needed = lengths
            memory = records.reshape(-1)
            memory_offsets = batch.out_indices[first] * size
            buffer = None
        else:
            # read whole sectors into a buffer
            starts = batch.positions[first] * size
            stops = (batch.positions[first + count - 1] + 1) * size
            offsets = starts - starts % sector
            lengths = stops + -stops % sector - offsets
            needed = stops - offsets
            memory = buffer = self._buffers.borrow(int(lengths.sum()))
            memory_offsets = np.cumsum(lengths) - lengths
        results = np.full_like(lengths, _NO_RESULT)
        processed = np.zeros(len(lengths), dtype=bool)
        self._flights[number] = _Flight(
            batch,
            piece.start,
            files,
            count,
            offsets,
            needed,
            memory,
            memory_offsets,
            results,
            processed,
            buffer,
        )
        fds = batch.per_record([files[shard].fd for shard, _, _ in batch.shard_spans])[
            first
        ]
        tags = number * PIECE_RECORDS + np.arange(len(lengths))
        self._queue.put(
            fds, offsets, memory.ctypes.data + memory_offsets, lengths, tags
        )

    def _is_full(self) -> bool:
        """Return whether enough requests are in flight."""
        flights = self._flights.values()
        in_flight = sum(
            int(flight.needed[flight.results == _NO_RESULT].sum()) for flight in flights
        )
        is_buffered = any(flight.buffer is not None for flight in flights)
        limit = _BUFFERED_IN_FLIGHT if is_buffered else _BYTES_IN_FLIGHT
        return (
            self._queue.in_flight + PIECE_RECORDS > self._queue.entries
            or in_flight >= limit
        )

    def _wait(self) -> None:
        """Wait for a part of the requests in flight, and record their results."""
        in_flight = self._queue.in_flight
        part = max(_PART_REQUESTS, in_flight // _PART_SHARE)
        # Do not wait for all requests unless only one is in flight, so that the disk
        # has work until the next requests are started.
        tags, results = self._queue.wait(max(1, min(part, in_flight // 2)))
        numbers = tags // PIECE_RECORDS
        for number in np.unique(numbers).tolist():
            of_flight = numbers == number
            flight = self._flights[number]
            flight.results[tags[of_flight] % PIECE_RECORDS] = results[of_flight]

    def _process(self) -> None:
        """Process the records of completed requests. Meanwhile, the kernel reads."""
        for number, flight in list(self._flights.items()):
            self._process_flight(flight)
            if flight.processed.all():
                del self._flights[number]
                if flight.buffer is not None:
                    self._buffers.give_back(flight.buffer)
                self._files.release(flight.files)

    def _process_flight(self, flight: _Flight) -> None:
        """Process all unprocessed records of completed requests."""
        is_ready = (flight.results != _NO_RESULT) & ~flight.processed
        if not is_ready.any():
            return
        if (is_ready & (flight.results < flight.needed)).any():
            raise RequestError
        indices = np.flatnonzero(np.repeat(is_ready, flight.count))
        # While requests are in flight, the device is the bottleneck, and more threads
        # would only cost processor time.
        threads = 1 if self._queue.in_flight else None
        # for each record, the offset in the memory minus the offset in the file
        shifts = np.repeat(flight.memory_offsets - flight.offsets, flight.count)
        record_offsets = (shifts + flight.batch.positions * self._size)[indices]
        self._destination.take(
            flight.memory, record_offsets, flight.start + indices, threads
        )
        flight.processed |= is_ready
