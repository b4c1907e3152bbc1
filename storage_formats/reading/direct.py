"""The engine `direct`, which reads with direct I/O through a queue of requests.

Direct I/O bypasses the page cache. It requires offsets, lengths and memory addresses
that are multiples of the sector size. If a record does not start and end at a sector
boundary, or must be decoded, the engine first reads whole sectors into a buffer.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.batch import PIECE_RECORDS, Ints
from storage_formats.reading.files import ShardFile, ShardFiles
from storage_formats.reading.memory import Bytes, lend
from storage_formats.reading.queues import (
    Queue,
    RequestError,
    borrow_queue,
    idle_queues,
)
from storage_formats.reading.request import ReadRequest

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


def read_direct(request: ReadRequest, files: ShardFiles) -> Generator[None, None, None]:
    """Read all records of a request with direct I/O, with several pieces in flight.
    Yield after each part of the work.

    After the generator ends or is closed, no read of the kernel writes to the sink.

    Raises:
        RequestError: the queue or a request was refused, or a request failed or read
            too few bytes.
    """
    size = request.stored.record_bytes
    length = min(PIECE_RECORDS, max(1, _PIECE_BYTES // size))
    queue = borrow_queue()
    flights: dict[int, _Flight] = {}
    try:
        for number, piece in enumerate(request.batch.pieces(length)):
            # `_wait` only notes which requests have completed. Their records are
            # processed in the next round, after the queue has been filled again, so
            # that the disk never waits for the processor.
            while _is_full(queue, flights):
                _process(request, queue, flights, files)
                _wait(queue, flights)
                yield
            _launch(request, number, piece, queue, flights, files)
        while flights:
            _process(request, queue, flights, files)
            _wait(queue, flights)
            yield
    except BaseException:
        # This waits for the requests in flight.
        queue.close()
        for flight in flights.values():
            files.release(flight.files)
        raise
    idle_queues.append(queue)


@dataclass
class _Flight:
    """A piece that is being read with r requests. The piece has k records.

    Attributes:
        part: the records of the piece in the batch.
        sources: int64 [k], memory address of each record.
        request_of: int64 [k], request that reads each record.
        needed: int64 [r], number of bytes that each request must read, up to the end of
            its last record.
        is_read: bool [r], whether each request is complete and its records are not
            processed yet.
        missing: number of requests in flight.
        buffer: buffer that the requests write to. None if they write to the sink.
    """

    part: slice
    files: dict[int, ShardFile]
    sources: Ints
    request_of: Ints
    needed: Ints
    is_read: NDArray[np.bool_]
    missing: int
    buffer: Bytes | None


def _launch(
    request: ReadRequest,
    number: int,
    piece: slice,
    queue: Queue,
    flights: dict[int, _Flight],
    files: ShardFiles,
) -> None:
    """Start the requests for the records `request.batch[piece]`."""
    size = request.stored.record_bytes
    batch = request.batch[piece]
    records = request.sink.records
    held = files.acquire_for(batch, size)
    sector = files.sector
    first, count = batch.runs(size, gap=_GAP_BYTES // size)
    # Records that do not start and end at sector boundaries are read into a buffer, and
    # so are records that need many small requests to be read directly.
    if records is not None and (size % sector or records.ctypes.data % sector):
        records = None
    if records is not None:
        direct_first, direct_count = batch.runs(size, contiguous_output=True)
        if len(direct_first) < _FEWER_REQUESTS * len(first):
            first = direct_first
            count = direct_count
        else:
            records = None
    starts = batch.positions[first] * size
    stops = (batch.positions[first + count - 1] + 1) * size
    # whole sectors are read
    offsets = starts - starts % sector
    lengths = stops + -stops % sector - offsets
    if records is not None:
        buffer = None
        addresses = records.ctypes.data + batch.out_indices[first] * size
    else:
        buffer = lend(int(lengths.sum()))
        addresses = buffer.ctypes.data + np.cumsum(lengths) - lengths
    request_of = np.repeat(np.arange(len(first)), count)
    flights[number] = _Flight(
        piece,
        held,
        (addresses - offsets)[request_of] + batch.positions * size,
        request_of,
        stops - offsets,
        np.zeros(len(first), dtype=bool),
        len(first),
        buffer,
    )
    descriptors = [held[shard].fd for shard, _, _ in batch.shard_spans]
    fds = batch.per_record(descriptors)[first]
    tags = number * PIECE_RECORDS + np.arange(len(first))
    queue.put(fds, offsets, addresses, lengths, tags)


def _is_full(queue: Queue, flights: dict[int, _Flight]) -> bool:
    """Return whether enough requests are in flight."""
    in_flight = 0
    limit = _BYTES_IN_FLIGHT
    for flight in flights.values():
        in_flight += int(flight.needed.sum()) * flight.missing // len(flight.needed)
        if flight.buffer is not None:
            limit = _BUFFERED_IN_FLIGHT
    return queue.in_flight + PIECE_RECORDS > queue.entries or in_flight >= limit


def _wait(queue: Queue, flights: dict[int, _Flight]) -> None:
    """Wait for a part of the requests in flight. If none is in flight, return at
    once.
    """
    in_flight = queue.in_flight
    part = max(_PART_REQUESTS, in_flight // _PART_SHARE)
    # Do not wait for all requests unless only one is in flight, so that the disk has
    # work until the next requests are started.
    tags, results = queue.wait(max(1, min(part, in_flight // 2)))
    numbers, indices = np.divmod(tags, PIECE_RECORDS)
    for number in set(numbers.tolist()):
        flight = flights[number]
        of_flight = numbers == number
        completed = indices[of_flight]
        if (results[of_flight] < flight.needed[completed]).any():
            raise RequestError
        flight.is_read[completed] = True
        flight.missing -= len(completed)


def _process(
    request: ReadRequest,
    queue: Queue,
    flights: dict[int, _Flight],
    files: ShardFiles,
) -> None:
    """Process the records of completed requests. Meanwhile, the kernel reads."""
    # While requests are in flight, the device is the bottleneck, and more threads would
    # only cost processor time.
    threads = 1 if queue.in_flight else None
    for number, flight in list(flights.items()):
        if flight.is_read.any():
            records = np.flatnonzero(flight.is_read[flight.request_of])
            request.take(
                flight.sources[records],
                flight.part.start + records,
                flight.buffer,
                threads=threads,
                is_in_place=flight.buffer is None,
            )
            flight.is_read[:] = False
        if not flight.missing:
            del flights[number]
            files.release(flight.files)
