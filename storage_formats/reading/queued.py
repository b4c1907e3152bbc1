"""Reading past the page cache with a queue of requests that the kernel serves: `io_uring`, `direct`, `sequential`.

Direct I/O costs a fifth of the processor time of buffered reads (no copy, no page cache to maintain) and keeps as
many requests in flight as the device takes. It wants offsets, lengths and memory in whole sectors: records that are
not are read into a buffer, with what shares their first and last sector, and copied out. So are records that lie so
close that one request for both, with what lies between, costs the device less than two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from storage_formats.reading.base import PIECE_RECORDS, Batch, Finish, Ints, Reader, Runs, Target
from storage_formats.reading.buffered import Request, cannot_read, read_fully
from storage_formats.reading.files import ShardFile, ShardFiles, descriptors
from storage_formats.reading.memory import BufferPool, Bytes, copy_memory, touch
from storage_formats.reading.queues import Queue, QueuePool

_BYTES_IN_FLIGHT = 32 << 20


class QueuedEngine:
    """Reads through a queue.

    Args:
        name: as users know it.
        files: opened for direct I/O.
        queues: whose requests are used.
        buffers: memory for records that are not whole sectors.
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
    """A piece on its way: run j begins at `starts[j]` of `files`, should bring `wanted[j]` bytes, `results[j]` came.

    `buffer` holds run j from `buffered_at[j]` on, where the records were not read straight to the target.
    """

    batch: Batch
    target: Target
    files: dict[int, ShardFile]
    runs: Runs
    wanted: Ints
    results: Ints
    missing: int
    buffer: Bytes | None = None
    buffered_at: Ints | None = None


class _QueuedReader:
    piece_records = PIECE_RECORDS

    def __init__(self, files: ShardFiles, queue: Queue, buffers: BufferPool, gap: int, *, gathered: bool) -> None:
        self._files = files
        self._size = files.record_bytes
        self._queue = queue
        self._buffers = buffers
        self._gap = gap
        self._gathered = gathered
        self._flights: dict[int, _Flight] = {}
        self._next = 0
        self.decode_threads: int | None = 1

    @property
    def ahead(self) -> int:
        """One piece more, as long as its requests fit into the queue and the bytes on their way are not too many."""
        requests = sum(len(flight.wanted) for flight in self._flights.values())
        size = sum(int(flight.wanted.sum()) for flight in self._flights.values())
        room = requests + PIECE_RECORDS <= self._queue.entries and size < _BYTES_IN_FLIGHT
        return len(self._flights) + room

    def start(self, batch: Batch, target: Target) -> Finish:
        files = self._files.acquire(batch)
        misfit = bool((self._size | target.records.ctypes.data) % self._files.sector)
        number, self._next = self._next, self._next + 1
        to_buffer = misfit or self._gathered or self._bridges(batch)
        launch = self._launch_buffered if to_buffer else self._launch_exact
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

    def _launch_exact(self, number: int, batch: Batch, target: Target, files: dict[int, ShardFile]) -> None:
        """Read straight to the target."""
        runs = Runs.of(batch, self._size, slots=target.slots)
        lengths = runs.count * self._size
        flight = _Flight(batch, target, files, runs, lengths, np.zeros_like(lengths), len(lengths))
        touch(target.records, target.slots)
        self._put(number, flight, batch.positions[runs.first] * self._size, target.addresses[runs.first], lengths)

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
            *(batch, target, files, runs, stops - offsets, np.zeros_like(lengths), len(lengths)),
            buffer=buffer,
            buffered_at=places - offsets,
        )
        self._put(number, flight, offsets, buffer.ctypes.data + places, lengths)

    def _put(self, number: int, flight: _Flight, offsets: Ints, addresses: Ints, lengths: Ints) -> None:
        self._flights[number] = flight
        tags = number * PIECE_RECORDS + np.arange(len(lengths))
        fds = descriptors(flight.files, flight.batch)[flight.runs.first]
        self._queue.put(fds, offsets, addresses, lengths, tags)

    def _finish(self, number: int) -> None:
        flight = self._flights[number]
        self.decode_threads = 1 if flight.missing else None
        while flight.missing:
            self._collect(flight.missing)
        try:
            if flight.buffer is not None and flight.buffered_at is not None:
                self._copy_out(flight, flight.buffer, flight.buffered_at)
            for run in np.flatnonzero(flight.results < flight.wanted).tolist():
                self._read_again(flight, run)
        finally:
            self._release(self._flights.pop(number))

    def _collect(self, minimum: int) -> None:
        tags, results = self._queue.wait(minimum)
        numbers = tags // PIECE_RECORDS
        for number in np.unique(numbers).tolist():
            mine, flight = numbers == number, self._flights[number]
            flight.results[tags[mine] % PIECE_RECORDS] = results[mine]
            flight.missing -= int(mine.sum())

    def _copy_out(self, flight: _Flight, buffer: Bytes, buffered_at: Ints) -> None:
        offsets = np.repeat(buffered_at, flight.runs.count) + flight.batch.positions * self._size
        copy_memory(buffer.ctypes.data + offsets, flight.target.addresses, self._size, threads=1)

    def _read_again(self, flight: _Flight, run: int) -> None:
        """A request that failed or was cut short: once more, without the queue, which also words the error."""
        first, count = int(flight.runs.first[run]), int(flight.runs.count[run])
        file = flight.files[int(flight.batch.shards[first])]
        slots = flight.target.slots
        try:
            with open(file.path, "rb", buffering=0) as plain:
                for index in range(first, first + count):
                    request = Request(
                        replace(file, fd=plain.fileno()), int(flight.batch.positions[index]), [int(slots[index])]
                    )
                    read_fully(request, flight.target, self._size)
        except OSError as error:
            raise cannot_read(file, error) from error

    def _release(self, flight: _Flight) -> None:
        if flight.buffer is not None:
            self._buffers.give_back(flight.buffer)
        self._files.release(flight.files)
