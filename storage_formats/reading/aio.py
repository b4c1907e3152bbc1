"""Linux AIO through system calls (`linux/aio_abi.h`). One thread can have many direct reads in flight.

The files must be open for direct I/O.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import sys
import weakref

import numpy as np

from storage_formats.reading.base import Ints
from storage_formats.reading.syscalls import system_call

_GENERIC = (0, 1, 2, 4)
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}
"""(io_setup, io_destroy, io_submit, io_getevents)"""

_REQUEST = np.dtype(
    [
        *(("tag", "u8"), ("key_and_flags", "u8"), ("opcode", "u2"), ("priority", "i2"), ("fd", "u4")),
        *(("address", "u8"), ("length", "u8"), ("offset", "i8"), ("unused", "u8", 2)),
    ]
)  # little endian, like all architectures above; opcode 0 is a read
_COMPLETION = np.dtype([("tag", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])


class AioQueue:
    """A `queues.Queue` that uses Linux AIO.

    Raises:
        OSError: the kernel refuses to create an AIO context.
    """

    def __init__(self, entries: int) -> None:
        self._setup, self._destroy, self._submit, self._getevents = _NUMBERS[platform.machine()]
        context = np.zeros(1, dtype=np.int64)
        system_call(self._setup, entries, context.ctypes.data)
        self._context = int(context[0])
        self._owner = os.getpid()
        self._at_end = weakref.finalize(self, _destroy, self._destroy, self._context, self._owner)
        self._completions = np.zeros(entries, dtype=_COMPLETION)
        self.entries = entries
        self.in_flight = 0
        self._refused: list[tuple[int, int]] = []

    def put(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints) -> None:
        requests = np.zeros(len(fds), dtype=_REQUEST)  # the kernel copies them
        columns = (("fd", fds), ("offset", offsets), ("address", addresses), ("length", lengths), ("tag", tags))
        for name, column in columns:
            requests[name] = column
        pointers = requests.ctypes.data + np.arange(len(fds)) * _REQUEST.itemsize
        done = 0
        while done < len(fds):
            try:
                done += system_call(self._submit, self._context, len(fds) - done, int(pointers[done:].ctypes.data))
            except OSError as error:  # the error of the first request that is not submitted yet
                self._refused.append((int(tags[done]), -(error.errno or errno.EIO)))
                done += 1
        self.in_flight += len(fds)

    def wait(self, minimum: int) -> tuple[Ints, Ints]:
        refused, self._refused = np.array(self._refused, dtype=np.int64).reshape(-1, 2), []
        self.in_flight -= len(refused)
        minimum, count = min(minimum - len(refused), self.in_flight, self.entries), 0
        while count < minimum:
            free = self._completions[count:]
            try:
                count += system_call(
                    self._getevents, self._context, minimum - count, len(free), int(free.ctypes.data), 0
                )
            except InterruptedError:
                continue  # a signal came, and its handler has run
        self.in_flight -= count
        done = self._completions[:count]
        tags, results = done["tag"].astype(np.int64), done["result"].astype(np.int64)
        return np.concatenate([refused[:, 0], tags]), np.concatenate([refused[:, 1], results])

    def close(self) -> None:
        """Wait until the kernel has completed all requests, and free the AIO context."""
        if self._at_end.alive:
            with contextlib.suppress(OSError):  # an earlier call that was interrupted has destroyed the context
                _destroy(self._destroy, self._context, self._owner)
            self._at_end.detach()


def _destroy(number: int, context: int, owner: int) -> None:
    if os.getpid() == owner:  # the context does not belong to a forked child
        system_call(number, context)


@functools.cache
def aio_works() -> bool:
    """Return True if this process can use Linux AIO."""
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return False
    try:
        AioQueue(1)
    except OSError:
        return False
    return True
