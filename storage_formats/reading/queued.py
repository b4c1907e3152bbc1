"""Reading past the page cache with a queue of requests that the kernel serves: `io_uring`, `direct`, `sequential`.

Direct I/O costs a fifth of the processor time of buffered reads (no copy, no page cache to maintain) and keeps as
many requests in flight as the device takes. It wants offsets, lengths and memory in whole sectors: records that are
not are read into a buffer, with what shares their first and last sector, and copied out; so are records that lie so
close that one request for both, with what lies between, costs the device less than two. Those that are to be decoded
are always read into a buffer, and decoded from there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from storage_formats.reading.base import PIECE_RECORDS, Batch, Finish, Ints, Reader, Runs, Target
from storage_formats.reading.buffered import cannot_read
from storage_formats.reading.files import ShardFile, ShardFiles, descriptors, ends_early
from storage_formats.reading.memory import BufferPool, Bytes, touch
from storage_formats.reading.queues import Queue, QueuePool

_PIECE_BYTES = 8 << 20  # of large records
_BYTES_IN_FLIGHT = 32 << 20
_BUFFERED_IN_FLIGHT = 16 << 20  # memory that has to be made first, and then stays in the processor's cache


class QueuedEngine:
    """Reads through a queue.

    Args:
        name: as users know it.
        files: opened for direct I/O.
        queues: whose requests are used.
        buffers: memory for what is not read straight to the answer.
        gap_bytes: what a request may read between two records for nobody, in whole records.
        gathered: read neighbours together also where the answer has them apart.
    """

    def __init__(
        self,
        name: str,
        files: ShardFiles,
        queues: QueuePool,
        buffers: BufferPool,
        gap_bytes: int,
        *,
        gathered: bool = False,
    ) -> None:
        self.name = name
        self._files = files
        self._queues = queues
        self._buffers = buffers
        self._gap = gap_bytes // files.record_bytes
        self._gathered = gathered

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        queue = self._queues.borrow()
        reader = _QueuedReader(self._files, queue, self._buffers, self._gap, gathered=self._gathered)
        try:
            yield reader
        finally:
            reader.abandon()
            self._queues.give_back(queue)

    def close(self) -> None:
        self._queues.close()


@dataclass
class _Flight:
    """A piece on its way.

    Request j reads from byte `offsets[j]` of its file to `places[j]` of `memory`; `wanted[j]` bytes are needed and
    `results[j]` came. `buffer` is set where `memory` is not the target's own.
    """

    batch: Batch
    target: Target
    files: dict[int, ShardFile]
    runs: Runs
    offsets: Ints
    wanted: Ints
    memory: Bytes
    places: Ints
    results: Ints
    missing: int
    buffer: Bytes | None = None


class _QueuedReader:
    def __init__(self, files: ShardFiles, queue: Queue, buffers: BufferPool, gap: int, *, gathered: bool) -> None:
        self._files = files
        self._size = files.record_bytes
        self._queue = queue
        self._buffers = buffers
        self._gap = gap
        self._gathered = gathered
        self._flights: dict[int, _Flight] = {}
        self._next = 0
        self.piece_records = min(PIECE_RECORDS, max(1, _PIECE_BYTES // self._size))

    @property
    def ahead(self) -> int:
        """One piece more, as long as its requests fit into the queue and the bytes on their way are not too many."""
        requests = sum(len(flight.wanted) for flight in self._flights.values())
        size = sum(int(flight.wanted.sum()) for flight in self._flights.values())
        buffered = any(flight.buffer is not None for flight in self._flights.values())
        most = _BUFFERED_IN_FLIGHT if buffered else _BYTES_IN_FLIGHT
        room = requests + PIECE_RECORDS <= self._queue.entries and size < most
        return len(self._flights) + room

    def start(self, batch: Batch, target: Target) -> Finish:
        files = self._files.acquire(batch)
        number, self._next = self._next, self._next + 1
        straight = target.direct and not (self._gathered or self._bridges(batch) or self._is_misfit(target))
        launch = self._launch_straight if straight else self._launch_buffered
        launch(number, batch, target, files)
        return functools.partial(self._finish, number)

    def abandon(self) -> None:
        """Wait until the kernel writes nowhere any more."""
        while self._queue.in_flight:
            self._queue.wait(self._queue.in_flight)
        for flight in self._flights.values():
            self._release(flight)
        self._flights.clear()

    def _bridges(self, batch: Batch) -> bool:
        """Whether two records of `batch` are to be read by one request with what lies between them."""
        apart = np.diff(batch.positions)
        return bool(((apart > 1) & (apart <= 1 + self._gap) & (np.diff(batch.shards) == 0)).any())

    def _is_misfit(self, target: Target) -> bool:
        """Whether records are not whole sectors, of the file or of memory."""
        return bool((self._size | target.records.ctypes.data) % self._files.sector)

    def _launch_straight(self, number: int, batch: Batch, target: Target, files: dict[int, ShardFile]) -> None:
        """Read to where the target has them."""
        runs = Runs.of(batch, self._size, slots=target.slots)
        lengths = runs.count * self._size
        touch(target.records, target.slots)
        flight = _Flight(
            *(batch, target, files, runs, batch.positions[runs.first] * self._size, lengths),
            *(target.records.reshape(-1), target.slots[runs.first] * self._size),
            *(np.zeros_like(lengths), len(lengths)),
        )
        self._put(number, flight, lengths)

    def _launch_buffered(self, number: int, batch: Batch, target: Target, files: dict[int, ShardFile]) -> None:
        """Read whole sectors around each run into a buffer."""
        runs = Runs.of(batch, self._size, gap=self._gap)
        starts = batch.positions[runs.first] * self._size
        stops = (batch.positions[runs.first + runs.count - 1] + 1) * self._size
        offsets = starts - starts % self._files.sector
        lengths = stops + -stops % self._files.sector - offsets
        places = np.cumsum(lengths) - lengths
        buffer = self._buffers.borrow(int(lengths.sum()))
        flight = _Flight(
            *(batch, target, files, runs, offsets, stops - offsets, buffer, places),
            *(np.zeros_like(lengths), len(lengths), buffer),
        )
        self._put(number, flight, lengths)

    def _put(self, number: int, flight: _Flight, lengths: Ints) -> None:
        self._flights[number] = flight
        tags = number * PIECE_RECORDS + np.arange(len(lengths))
        fds = descriptors(flight.files, flight.batch)[flight.runs.first]
        self._queue.put(fds, flight.offsets, flight.memory.ctypes.data + flight.places, lengths, tags)

    def _finish(self, number: int) -> None:
        flight = self._flights[number]
        # while the device takes the time, to hand over half a millisecond's work costs more than it saves
        threads = 1 if flight.missing else None
        while flight.missing:
            self._collect(flight.missing)
        try:
            for request in np.flatnonzero(flight.results < flight.wanted).tolist():
                _read_again(flight, request, self._size)
            if flight.buffer is None:
                flight.target.finish(threads)
            else:
                in_memory = np.repeat(flight.places - flight.offsets, flight.runs.count)
                starts = in_memory + flight.batch.positions * self._size
                flight.target.take(flight.buffer, starts, slice(None), threads)
        finally:
            self._release(self._flights.pop(number))

    def _collect(self, minimum: int) -> None:
        tags, results = self._queue.wait(minimum)
        numbers = tags // PIECE_RECORDS
        for number in np.unique(numbers).tolist():
            mine, flight = numbers == number, self._flights[number]
            flight.results[tags[mine] % PIECE_RECORDS] = results[mine]
            flight.missing -= int(mine.sum())

    def _release(self, flight: _Flight) -> None:
        if flight.buffer is not None:
            self._buffers.give_back(flight.buffer)
        self._files.release(flight.files)


def _read_again(flight: _Flight, request: int, record_bytes: int) -> None:
    """Read the records of a request that failed or was cut short without the queue, which also words the error."""
    first, count = int(flight.runs.first[request]), int(flight.runs.count[request])
    file = flight.files[int(flight.batch.shards[first])]
    in_memory = int(flight.places[request]) - int(flight.offsets[request])
    try:
        with open(file.path, "rb", buffering=0) as plain:
            for position in flight.batch.positions[first : first + count].tolist():
                at, stop = position * record_bytes, (position + 1) * record_bytes
                while at < stop:
                    came = os.preadv(plain.fileno(), [flight.memory[in_memory + at : in_memory + stop].data], at)
                    if not came:
                        raise ends_early(file, position)
                    at += came
    except OSError as error:
        raise cannot_read(file, error) from error
