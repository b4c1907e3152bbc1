"""Reading through the page cache, on any system."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from storage_formats.codecs import Records
from storage_formats.errors import CorruptIndexError
from storage_formats.reading.base import PIECE_RECORDS, Batch, Finish, Ints, Reader, Runs, Target
from storage_formats.reading.files import ShardFile, ShardFiles, ends_early

_THREADS = 16
_MAX_IOVECS = 512  # below Linux's IOV_MAX of 1024
_DECODE_THREADS = 1  # the device takes the time; to hand half a millisecond's work over costs more than it saves


@dataclass(frozen=True)
class Request:
    """`count` neighbouring records from `position` of `file` on, for `slots` of the target."""

    file: ShardFile
    position: int
    slots: list[int]


class BufferedEngine:
    """The kernel is told of the reads of several pieces ahead (WILLNEED), and one thread copies them out."""

    name = "buffered"

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        with contextlib.ExitStack() as held:
            yield _BufferedReader(self._files, held)

    def announce(self, batch: Batch) -> None:
        """Have the kernel begin to read `batch` into the page cache."""
        size = self._files.record_bytes
        for piece in batch.pieces(PIECE_RECORDS):
            files = self._files.acquire(piece)
            try:
                _announce(_requests(piece, piece.places, files, size), size)
            finally:
                self._files.release(files)

    def close(self) -> None:
        """Nothing is kept."""


class _BufferedReader:
    ahead = 4  # 512 requests of one record
    piece_records = PIECE_RECORDS

    def __init__(self, files: ShardFiles, held: contextlib.ExitStack) -> None:
        self._files = files
        self._held = held

    def start(self, batch: Batch, target: Target) -> Finish:
        files, let_go = _hold(self._files, batch, self._held)
        size = self._files.record_bytes
        requests = _requests(batch, target.slots, files, size)
        _announce(requests, size)

        def finish() -> None:
            with let_go:
                for request in requests:
                    read_fully(request, target.records, size)
            target.finish(_DECODE_THREADS)

        return finish


class PortableEngine:
    """Threads that each wait for a read of their own: many in flight without any call that only Linux has."""

    name = "portable"

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._owner = os.getpid()

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        with self._lock:
            if self._threads is None or self._owner != os.getpid():  # threads do not survive a fork
                self._threads, self._owner = ThreadPoolExecutor(_THREADS, "edje-read"), os.getpid()
            threads = self._threads
        with contextlib.ExitStack() as held:
            reader = _ThreadedReader(self._files, threads, held)
            try:
                yield reader
            finally:
                reader.wait()

    def close(self) -> None:
        with self._lock:
            if self._threads is not None and self._owner == os.getpid():
                self._threads.shutdown()
            self._threads = None


class _ThreadedReader:
    ahead = 2
    piece_records = PIECE_RECORDS

    def __init__(self, files: ShardFiles, threads: ThreadPoolExecutor, held: contextlib.ExitStack) -> None:
        self._files = files
        self._threads = threads
        self._held = held
        self._running: set[Future[None]] = set()

    def start(self, batch: Batch, target: Target) -> Finish:
        files, let_go = _hold(self._files, batch, self._held)
        size = self._files.record_bytes
        requests = _requests(batch, target.slots, files, size)
        records = target.records  # made here: threads that ask at once might each make them
        futures = [self._threads.submit(read_fully, request, records, size) for request in requests]
        self._running.update(futures)

        def finish() -> None:
            with let_go:
                wait(futures)
                self._running.difference_update(futures)
            for future in futures:
                future.result()
            target.finish(_DECODE_THREADS)

        return finish

    def wait(self) -> None:
        for future in self._running:
            future.cancel()
        wait(self._running)


def _hold(
    files: ShardFiles, batch: Batch, held: contextlib.ExitStack
) -> tuple[dict[int, ShardFile], contextlib.ExitStack]:
    """The files of `batch`, and what lets go of them when it is left, or else when `held` is."""
    acquired = files.acquire(batch)
    let_go = held.enter_context(contextlib.ExitStack())
    let_go.callback(files.release, acquired)
    return acquired, let_go


def _requests(batch: Batch, slots: Ints, files: dict[int, ShardFile], record_bytes: int) -> list[Request]:
    runs = Runs.of(batch, record_bytes)
    places = slots.tolist()
    return [
        Request(files[shard], position, places[first : first + count])
        for shard, position, first, count in zip(
            batch.shards[runs.first].tolist(),
            batch.positions[runs.first].tolist(),
            runs.first.tolist(),
            runs.count.tolist(),
            strict=True,
        )
    ]


def _announce(requests: list[Request], record_bytes: int) -> None:
    """Have the kernel begin to read into the page cache, where it can be told; returns at once."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        for request in requests:
            start, size = request.position * record_bytes, len(request.slots) * record_bytes
            os.posix_fadvise(request.file.fd, start, size, os.POSIX_FADV_WILLNEED)


def cannot_read(file: ShardFile, error: OSError) -> CorruptIndexError:
    """The error for a shard that the operating system does not read."""
    return CorruptIndexError(f"cannot read {file.path}: {error.strerror}; run 'edje-index verify'")


def read_fully(request: Request, records: Records, record_bytes: int) -> None:
    """Read a request however many calls it takes. CorruptIndexError where the file ends or cannot be read."""
    slots, done = request.slots, 0
    while done < len(slots) * record_bytes:  # a call may be served in part
        skip, inside = divmod(done, record_bytes)
        rest = slots[skip : skip + _MAX_IOVECS]
        buffers = [records[rest[0]][inside:].data, *(records[slot].data for slot in rest[1:])]
        try:
            count = os.preadv(request.file.fd, buffers, request.position * record_bytes + done)
        except OSError as error:
            raise cannot_read(request.file, error) from error
        if not count:
            raise ends_early(request.file, request.position + len(slots) - 1)
        done += count
