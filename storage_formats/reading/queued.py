"""Engines that read with direct I/O through a queue of requests: `io_uring`, `direct` and `sequential`.

Direct I/O bypasses the page cache. All offsets, lengths and memory addresses must be multiples of the sector size. If a
record does not start and end at a sector boundary, or must be decoded, the engine reads the sectors into a buffer
first.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import cannot_read
from storage_formats.reading.base import EVERY_RECORD, PIECE_RECORDS, Batch, Destination, Finish, Ints, Reader, Runs
from storage_formats.reading.files import ShardFile, ShardFiles, descriptors, ends_early
from storage_formats.reading.memory import BufferPool, Bytes, touch
from storage_formats.reading.queues import QueuePool

_PIECE_BYTES = 8 << 20  # limit for pieces of large records
_BYTES_IN_FLIGHT = 32 << 20
_BUFFERED_IN_FLIGHT = 16 << 20  # less, so that the buffers stay in the processor's cache
_PART_REQUESTS = 32  # few, so that little is left to do when the last requests of a batch are complete
_PART_SHARE = 4  # with many requests in flight, a part is a fourth of these requests
_NO_RESULT = np.iinfo(np.int64).min


@dataclass(frozen=True)
class QueuedOptions:
    """How a queued engine combines reads.

    Attributes:
        gap_bytes: maximum number of unrequested bytes between two records in one request, rounded down to whole
            records.
        gather: whether one request may read neighbouring records that are not neighbours in the output.
    """

    gap_bytes: int
    gather: bool = False


class QueuedEngine:
    """An engine that reads with direct I/O through a queue of requests.

    Args:
        name: name of the engine.
        files: shard files, opened for direct I/O.
        queues: pool of queues. Each reader borrows one queue.
        buffers: pool of buffers for records that cannot be read directly into the destination.
        options: how to combine records into requests.
    """

    def __init__(
        self, name: str, files: ShardFiles, queues: QueuePool, buffers: BufferPool, options: QueuedOptions
    ) -> None:
        self.name = name
        self._files = files
        self._queues = queues
        self._buffers = buffers
        self._options = options

    def reader(self) -> Reader:
        return _QueuedReader(self._files, self._queues, self._buffers, self._options)

    def close(self) -> None:
        self._queues.close()


@dataclass
class _Flight:
    """A piece that is being read with r requests.

    Attributes:
        offsets: [r], byte offset in the file of each request.
        needed: [r], number of bytes that each request must read, up to the end of its last record.
        memory: memory that the requests write to.
        memory_offsets: [r], byte offset in `memory` of each request.
        results: [r], number of bytes read, a negative errno, or `_NO_RESULT`.
        processed: bool [r], whether the destination has processed the records of each request.
        missing: number of requests without a result.
        buffer: buffer from the pool that contains `memory`. None if `memory` belongs to the destination.
    """

    batch: Batch
    destination: Destination
    files: dict[int, ShardFile]
    runs: Runs
    offsets: Ints
    needed: Ints
    memory: Bytes
    memory_offsets: Ints
    results: Ints
    processed: NDArray[np.bool_]
    missing: int
    buffer: Bytes | None = None


class _QueuedReader:
    def __init__(self, files: ShardFiles, queues: QueuePool, buffers: BufferPool, options: QueuedOptions) -> None:
        self._files = files
        self._size = files.record_bytes
        self._queues = queues
        self._queue = queues.borrow()
        self._holds_queue = True
        self._buffers = buffers
        self._gap = options.gap_bytes // files.record_bytes
        self._gather = options.gather
        self._flights: dict[int, _Flight] = {}
        self._next = 0
        self.piece_records = min(PIECE_RECORDS, max(1, _PIECE_BYTES // self._size))

    @property
    def ahead(self) -> int:
        """Maximum number of pieces in flight: the current number, plus one if the queue has room."""
        requests = sum(len(flight.needed) for flight in self._flights.values())
        size = sum(int(flight.needed.sum()) for flight in self._flights.values())
        buffered = any(flight.buffer is not None for flight in self._flights.values())
        limit = _BUFFERED_IN_FLIGHT if buffered else _BYTES_IN_FLIGHT
        has_room = requests + PIECE_RECORDS <= self._queue.entries and size < limit
        return len(self._flights) + has_room

    def start(self, batch: Batch, destination: Destination) -> Finish:
        files = self._files.acquire(batch)
        number, self._next = self._next, self._next + 1
        to_buffer = self._gather or not destination.direct or self._has_small_gap(batch)
        launch = self._launch_buffered if to_buffer or self._is_unaligned(destination) else self._launch_direct
        launch(number, batch, destination, files)
        return functools.partial(self._finish, number)

    def close(self) -> None:
        self._holds_queue = False  # first, so that `abandon` never closes a queue that another reader may have
        self._queues.give_back(self._queue)

    def abandon(self) -> None:
        """Wait until the kernel has completed all requests of this reader, and release the files."""
        # An exception may have come before the state of the queue and the buffers was recorded.
        if self._holds_queue:
            self._queue.close()
        while self._flights:
            self._files.release(self._flights.popitem()[1].files)

    def _has_small_gap(self, batch: Batch) -> bool:
        distances = np.diff(batch.positions)
        return bool(((distances > 1) & (distances <= 1 + self._gap) & (np.diff(batch.shards) == 0)).any())

    def _is_unaligned(self, destination: Destination) -> bool:
        return bool((self._size | destination.records.ctypes.data) % self._files.sector)

    def _launch_direct(self, number: int, batch: Batch, destination: Destination, files: dict[int, ShardFile]) -> None:
        """Start requests that read the records directly into the destination."""
        runs = Runs.of(batch, self._size, record_indices=destination.record_indices)
        lengths = runs.count * self._size
        touch(destination.records, destination.record_indices)
        flight = _Flight(
            batch=batch,
            destination=destination,
            files=files,
            runs=runs,
            offsets=batch.positions[runs.first] * self._size,
            needed=lengths,
            memory=destination.records.reshape(-1),
            memory_offsets=destination.record_indices[runs.first] * self._size,
            results=np.full_like(lengths, _NO_RESULT),
            processed=np.zeros(len(lengths), dtype=bool),
            missing=len(lengths),
        )
        self._put(number, flight, lengths)

    def _launch_buffered(
        self, number: int, batch: Batch, destination: Destination, files: dict[int, ShardFile]
    ) -> None:
        """Start requests that read the sectors with the records into a buffer."""
        runs = Runs.of(batch, self._size, gap=self._gap)
        starts = batch.positions[runs.first] * self._size
        stops = (batch.positions[runs.first + runs.count - 1] + 1) * self._size
        offsets = starts - starts % self._files.sector
        lengths = stops + -stops % self._files.sector - offsets
        buffer = self._buffers.borrow(int(lengths.sum()))
        flight = _Flight(
            batch=batch,
            destination=destination,
            files=files,
            runs=runs,
            offsets=offsets,
            needed=stops - offsets,
            memory=buffer,
            memory_offsets=np.cumsum(lengths) - lengths,
            results=np.full_like(lengths, _NO_RESULT),
            processed=np.zeros(len(lengths), dtype=bool),
            missing=len(lengths),
            buffer=buffer,
        )
        self._put(number, flight, lengths)

    def _put(self, number: int, flight: _Flight, lengths: Ints) -> None:
        self._flights[number] = flight
        tags = number * PIECE_RECORDS + np.arange(len(lengths))
        fds = descriptors(flight.files, flight.batch)[flight.runs.first]
        self._queue.put(fds, flight.offsets, flight.memory.ctypes.data + flight.memory_offsets, lengths, tags)

    def _finish(self, number: int) -> None:
        """Wait for the requests of a piece. Meanwhile, process the records of every piece as they arrive."""
        flight = self._flights[number]
        while flight.missing:
            in_flight = self._queue.in_flight
            self._collect(min(in_flight, max(_PART_REQUESTS, in_flight // _PART_SHARE)))
            for each in self._flights.values():
                self._process(each)
        self._release(self._flights.pop(number))

    def _process(self, flight: _Flight) -> None:
        """Process all unprocessed records of completed requests."""
        is_ready = (flight.results != _NO_RESULT) & ~flight.processed
        if not is_ready.any():
            return
        for request in np.flatnonzero(is_ready & (flight.results < flight.needed)).tolist():
            _read_again(flight, request, self._size)
        part = EVERY_RECORD if is_ready.all() else np.flatnonzero(np.repeat(is_ready, flight.runs.count))
        # While reads are in flight the device is the bottleneck: more threads would only cost processor time.
        threads = 1 if self._queue.in_flight else None
        if flight.buffer is None:
            flight.destination.finish(part, threads)
        else:
            shifts = np.repeat(flight.memory_offsets - flight.offsets, flight.runs.count)
            record_offsets = (shifts + flight.batch.positions * self._size)[part]
            flight.destination.take(flight.buffer, record_offsets, part, threads)
        flight.processed |= is_ready

    def _collect(self, minimum: int) -> None:
        tags, results = self._queue.wait(minimum)
        numbers = tags // PIECE_RECORDS
        for number in np.unique(numbers).tolist():
            of_flight, flight = numbers == number, self._flights[number]
            flight.results[tags[of_flight] % PIECE_RECORDS] = results[of_flight]
            flight.missing -= int(of_flight.sum())

    def _release(self, flight: _Flight) -> None:
        if flight.buffer is not None:
            self._buffers.give_back(flight.buffer)
        self._files.release(flight.files)


def _read_again(flight: _Flight, request: int, record_bytes: int) -> None:
    """Read the records of a failed request again, with blocking reads."""
    first, count = int(flight.runs.first[request]), int(flight.runs.count[request])
    file = flight.files[int(flight.batch.shards[first])]
    shift = int(flight.memory_offsets[request]) - int(flight.offsets[request])
    try:
        with open(file.path, "rb", buffering=0) as plain_file:
            for position in flight.batch.positions[first : first + count].tolist():
                offset, stop = position * record_bytes, (position + 1) * record_bytes
                while offset < stop:
                    rest = flight.memory[shift + offset : shift + stop].data
                    read_bytes = os.preadv(plain_file.fileno(), [rest], offset)
                    if not read_bytes:
                        raise ends_early(file, position)
                    offset += read_bytes
    except OSError as error:
        raise cannot_read(file.path, error) from error
