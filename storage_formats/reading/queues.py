"""Queues of asynchronous read requests. The kernel reads while the caller continues.

The queues use Linux AIO (`linux/aio_abi.h`). io_uring takes as much processor time, and
many containers forbid it (docs/lab/storage-io.md). Requests are written as items of a
structured array, and one system call starts many of them. Calling a library once per
request would be slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
import weakref
from typing import Any

import numpy as np

from storage_formats.reading.batch import PIECE_RECORDS, Ints

# Maximum number of requests in flight of one queue. This number keeps a disk busy
# (docs/lab/storage-io.md), and has room for four pieces of 128 requests.
ENTRIES = 512

_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""Numbers of the system calls (io_setup, io_destroy, io_submit, io_getevents) on each
architecture.
"""
# `struct iocb` of linux/aio_abi.h on little-endian machines, which all architectures
# above are. Opcode 0 is a read.
_REQUEST = np.dtype(
    [
        ("tag", "u8"),
        ("key_and_flags", "u8"),
        ("opcode", "u2"),
        ("priority", "i2"),
        ("fd", "u4"),
        ("address", "u8"),
        ("length", "u8"),
        ("offset", "i8"),
        ("unused", "u8", 2),
    ]
)
# `struct io_event` of linux/aio_abi.h
_COMPLETION = np.dtype(
    [("tag", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")]
)


@functools.cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long]
    return function


def system_call(number: int, *arguments: int) -> int:
    """Make a system call without the GIL, and return the result. Raise OSError if
    the call fails.
    """
    result = _syscall()(number, *(ctypes.c_long(argument) for argument in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


class RequestError(Exception):
    """The kernel has refused a queue, a request or a memory map, or a request has
    failed.

    This class is no subclass of OSError, because a signal handler may raise
    TimeoutError, a subclass of OSError, which must not be taken for a failed request.
    """


class Queue:
    """A queue of reads. The files must be open for direct I/O. Otherwise, starting a
    request waits until the kernel has read the data.

    Queues are not thread-safe.

    Args:
        entries: maximum number of requests in flight.

    Attributes:
        in_flight: number of started requests whose results `wait` has not returned yet.
        owner: id of the process that can use the queue.

    Raises:
        OSError: the kernel refuses to create a queue.
    """

    def __init__(self, entries: int) -> None:
        self._setup, self._destroy, self._submit, self._getevents = _CALLS[
            platform.machine()
        ]
        context = np.zeros(1, dtype=np.int64)
        system_call(self._setup, entries, context.ctypes.data)
        self._context = int(context[0])
        self.owner = os.getpid()
        self._at_end = weakref.finalize(
            self, _destroy, self._destroy, self._context, self.owner
        )
        self._completions = np.zeros(entries, dtype=_COMPLETION)
        self.entries = entries
        self.in_flight = 0

    def put(
        self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints
    ) -> None:
        """Start one read for each element of the arrays. There must be at most `entries
        - in_flight` elements.

        Read i transfers `lengths[i]` bytes from byte `offsets[i]` of file descriptor
        `fds[i]` to the memory at `addresses[i]`. This memory must remain allocated
        until `wait` returns `tags[i]`.

        Raises:
            RequestError: the kernel refuses a request. The caller must close the queue.
        """
        # the kernel copies the requests, so this array may be freed after the call
        requests = np.zeros(len(fds), dtype=_REQUEST)
        requests["fd"] = fds
        requests["offset"] = offsets
        requests["address"] = addresses
        requests["length"] = lengths
        requests["tag"] = tags
        pointers = requests.ctypes.data + np.arange(len(fds)) * _REQUEST.itemsize
        done = 0
        while done < len(fds):
            try:
                done += system_call(
                    self._submit,
                    self._context,
                    len(fds) - done,
                    int(pointers[done:].ctypes.data),
                )
            except OSError as error:
                raise RequestError from error
        self.in_flight += len(fds)

    def wait(self, minimum: int) -> tuple[Ints, Ints]:
        """Wait until at least `minimum` requests are complete. Return (tags, results)
        of all completed requests.

        A result is the number of bytes read or a negative errno.
        """
        minimum = min(minimum, self.in_flight)
        count = 0
        while count < minimum:
            free = self._completions[count:]
            # If a signal interrupts the call, the call is repeated after the handler of
            # the signal has run.
            with contextlib.suppress(InterruptedError):
                count += system_call(
                    self._getevents,
                    self._context,
                    minimum - count,
                    len(free),
                    int(free.ctypes.data),
                    0,
                )
        self.in_flight -= count
        done = self._completions[:count]
        return done["tag"].astype(np.int64), done["result"].astype(np.int64)

    def close(self) -> None:
        """Wait until all requests of the queue are complete, and free the queue.
        May be called repeatedly.
        """
        if self._at_end.alive:
            # The call fails if an earlier call of `close`, which an exception has
            # interrupted, has already destroyed the context.
            with contextlib.suppress(OSError):
                _destroy(self._destroy, self._context, self.owner)
            self._at_end.detach()


def _destroy(number: int, context: int, owner: int) -> None:
    # a forked child process must not destroy the context of its parent
    if os.getpid() == owner:
        system_call(number, context)


@functools.cache
def can_queue() -> bool:
    """Return True if this process can use queues."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return False
    try:
        Queue(1).close()
    except OSError:
        return False
    return True


idle_queues: list[Queue] = []
"""Queues that `borrow_queue` returns again, because creating a queue is slow."""


def borrow_queue() -> Queue:
    """Return an idle queue or a new queue. The caller appends the queue to
    `idle_queues` when no request is in flight.

    Raises:
        RequestError: the kernel refuses to create a queue.
    """
    with contextlib.suppress(IndexError):
        # a forked child process cannot use the queues of its parent
        while (queue := idle_queues.pop()).owner != os.getpid():
            pass
        return queue
    try:
        return Queue(ENTRIES)
    except OSError:
        # The kernel limits the entries of all processes together (fs.aio-max-nr). A
        # smaller queue with room for one piece may still be possible.
        try:
            return Queue(PIECE_RECORDS)
        except OSError as error:
            raise RequestError from error
