"""Queues of asynchronous read requests. The kernel reads while the caller continues."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.base import PIECE_RECORDS, Ints

ENTRIES = 512  # enough to keep a disk busy (docs/lab/storage-io.md); room for four pieces of single records
_FEWEST_ENTRIES = PIECE_RECORDS  # kernels before 5.12 count rings as locked memory, which has a small limit


class Queue(Protocol):
    """A queue of read requests. Not thread-safe.

    Attributes:
        entries: maximum number of requests in flight.
        in_flight: number of requests that `wait` has not returned yet.
    """

    entries: int
    in_flight: int

    def put(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints) -> None:
        """Start one read for each element of the arrays. There must be at most `entries - in_flight` elements.

        Read i transfers `lengths[i]` bytes from byte `offsets[i]` of file descriptor `fds[i]` to the memory at
        `addresses[i]`. This memory must remain allocated until `wait` returns `tags[i]`.
        """
        ...

    def wait(self, minimum: int) -> tuple[Ints, NDArray[np.int64]]:
        """Wait until at least `minimum` requests are complete. Return (tags, results) of all completed requests.

        A result is the number of bytes read or a negative errno.
        """
        ...

    def close(self) -> None:
        """Wait until all requests of the queue are complete, and free the queue. May be called repeatedly."""
        # Implementations must not rely on `in_flight`: an exception may come before a request is counted.
        ...


class QueuePool:
    """A pool of reusable queues, because creating a queue is slow. Thread-safe.

    In a forked child process the pool is empty.
    """

    def __init__(self, make: Callable[[int], Queue]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Queue] = []
        self._owner = os.getpid()

    def borrow(self) -> Queue:
        """Return an idle queue or a new queue. The caller must return the queue with `give_back`.

        Raises:
            OSError: the kernel refuses to create a queue.
        """
        with self._lock:
            if self._owner != os.getpid():
                self._free, self._owner = [], os.getpid()
            if self._free:
                return self._free.pop()
        try:
            return self._make(ENTRIES)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return self._make(_FEWEST_ENTRIES)

    def give_back(self, queue: Queue) -> None:
        """Return an idle queue to the pool."""
        with self._lock:
            self._free.append(queue)

    def close(self) -> None:
        """Free the idle queues."""
        with self._lock:
            self._free.clear()
