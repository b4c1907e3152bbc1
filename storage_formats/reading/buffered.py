"""Engines that read through the page cache. `PortableEngine` works on any operating system."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from storage_formats.codecs import Records
from storage_formats.crew import Crew
from storage_formats.errors import cannot_read
from storage_formats.reading.base import EVERY_RECORD, PIECE_RECORDS, Batch, Destination, Finish, Ints, Reader, Runs
from storage_formats.reading.files import ShardFile, ShardFiles, ends_early

_THREADS = 8  # for each of the two pieces that are read at the same time
_MAX_IOVECS = 512  # below Linux's IOV_MAX of 1024
_DECODE_THREADS = 1  # while the device is the bottleneck: more threads would only cost processor time


@dataclass(frozen=True)
class Request:
    """A request to read neighbouring records of one file.

    Attributes:
        file: file that contains the records.
        position: position of the first record in the file.
        record_indices: index of each record in the array `records` of the destination.
    """

    file: ShardFile
    position: int
    record_indices: list[int]


class BufferedEngine:
    """Asks the kernel to prefetch several pieces into the page cache (POSIX_FADV_WILLNEED), then copies the records."""

    name = "buffered"

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    def reader(self) -> Reader:
        return _BufferedReader(self._files)

    def announce(self, batch: Batch) -> None:
        """Ask the kernel to start reading `batch` into the page cache."""
        size = self._files.record_bytes
        for piece in batch.pieces(PIECE_RECORDS):
            files = self._files.acquire(piece)
            try:
                _announce(_requests(piece, piece.out_indices, files, size), size)
            finally:
                self._files.release(files)

    def close(self) -> None:
        """Do nothing, because idle readers have no resources."""


class _BufferedReader:
    ahead = 4  # 512 requests of one record
    piece_records = PIECE_RECORDS

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._held_files = contextlib.ExitStack()
        self._announced = 0  # pieces that the device may still read

    def close(self) -> None:
        self._held_files.close()

    abandon = close  # only the calling thread reads

    def start(self, batch: Batch, destination: Destination) -> Finish:
        files, release = _hold(self._files, batch, self._held_files)
        size = self._files.record_bytes
        requests = _requests(batch, destination.record_indices, files, size)
        _announce(requests, size)
        self._announced += 1

        def finish() -> None:
            with release:
                for request in requests:
                    read_fully(request, destination.records, size)
            self._announced -= 1
            destination.finish(EVERY_RECORD, _DECODE_THREADS if self._announced else None)

        return finish


class PortableEngine:
    """Reads through the page cache on several threads. Uses no system calls that only Linux has."""

    name = "portable"

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    def reader(self) -> Reader:
        return _ThreadedReader(self._files)

    def close(self) -> None:
        """Do nothing, because idle readers have no resources."""


class _ThreadedReader:
    ahead = 2
    piece_records = PIECE_RECORDS

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._held_files = contextlib.ExitStack()
        self._crews: list[Crew[Request]] = []

    def start(self, batch: Batch, destination: Destination) -> Finish:
        files, release = _hold(self._files, batch, self._held_files)
        size = self._files.record_bytes
        requests = _requests(batch, destination.record_indices, files, size)
        records = destination.records  # allocated here, because several threads could each allocate their own
        crew = Crew(lambda request: read_fully(request, records, size), requests)
        self._crews.append(crew)
        crew.start(min(_THREADS, len(requests)))

        def finish() -> None:
            with release:
                crew.finish()
            self._crews.remove(crew)
            destination.finish(EVERY_RECORD, _DECODE_THREADS)

        return finish

    def close(self) -> None:
        self._held_files.close()

    def abandon(self) -> None:
        for crew in self._crews:
            crew.abandon()
        self._held_files.close()


def _hold(
    files: ShardFiles, batch: Batch, held_files: contextlib.ExitStack
) -> tuple[dict[int, ShardFile], contextlib.ExitStack]:
    """Acquire the files of `batch`. Return the files keyed by shard number, and a context that releases the files."""
    acquired = files.acquire(batch)
    release = held_files.enter_context(contextlib.ExitStack())
    release.callback(files.release, acquired)
    return acquired, release


def _requests(batch: Batch, record_indices: Ints, files: dict[int, ShardFile], record_bytes: int) -> list[Request]:
    runs = Runs.of(batch, record_bytes)
    indices = record_indices.tolist()
    return [
        Request(files[shard], position, indices[first : first + count])
        for shard, position, first, count in zip(
            batch.shards[runs.first].tolist(),
            batch.positions[runs.first].tolist(),
            runs.first.tolist(),
            runs.count.tolist(),
            strict=True,
        )
    ]


def _announce(requests: list[Request], record_bytes: int) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        for request in requests:
            start, size = request.position * record_bytes, len(request.record_indices) * record_bytes
            os.posix_fadvise(request.file.fd, start, size, os.POSIX_FADV_WILLNEED)


def read_fully(request: Request, records: Records, record_bytes: int) -> None:
    """Read all records of a request into `records`.

    Raises:
        CorruptIndexError: the file ends early or cannot be read.
    """
    indices, done = request.record_indices, 0
    while done < len(indices) * record_bytes:
        skip, inside = divmod(done, record_bytes)
        rest = indices[skip : skip + _MAX_IOVECS]
        buffers = [records[rest[0]][inside:].data, *(records[index].data for index in rest[1:])]
        try:
            count = os.preadv(request.file.fd, buffers, request.position * record_bytes + done)
        except OSError as error:
            raise cannot_read(request.file.path, error) from error
        if not count:
            raise ends_early(request.file, request.position + len(indices) - 1)
        done += count
