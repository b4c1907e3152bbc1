"""Queues of read requests that the kernel serves while the caller does something else."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.base import PIECE_RECORDS, Ints

ENTRIES = 512  # 64 gave 0.7 of the disk of docs/architecture.md, 256 all of it; four pieces of single records fit
_FEWEST = PIECE_RECORDS  # where kernels before 5.12 count rings as locked memory, of which users have little


class Queue(Protocol):
    """Used by one thread at a time. `in_flight` counts requests whose completion was not taken."""

    entries: int
    in_flight: int

    def put(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints) -> None:
        """Start reads, at most `entries - in_flight`; the memory must live until their completions were taken."""
        ...

    def wait(self, minimum: int) -> tuple[Ints, NDArray[np.int64]]:
        """Wait for `minimum` completions: (tags, bytes read or a negative errno) of all there are."""
        ...


class QueuePool:
    """Queues that callers borrow, so that none is made for each fetch; forgotten after a fork. Thread-safe."""

    def __init__(self, make: Callable[[int], Queue]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Queue] = []
        self._owner = os.getpid()

    def borrow(self) -> Queue:
        """An idle queue, to be given to `give_back`. OSError: the kernel has no more of them."""
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
            return self._make(_FEWEST)

    def give_back(self, queue: Queue) -> None:
        """Keep an idle queue for another borrower."""
        with self._lock:
            self._free.append(queue)

    def close(self) -> None:
        """Let the idle queues go."""
        with self._lock:
            self._free.clear()
