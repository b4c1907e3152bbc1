"""Queues of asynchronous read requests. The kernel reads while the caller continues.

`Ring` uses io_uring. Its interface is two rings in shared memory and one system call (Axboe, "Efficient IO with
io_uring", 2019; `linux/io_uring.h`). Many requests are written at once as rows of a structured array; one call of a
library per request would be slower (docs/lab/storage-io.md). `AioQueue` uses Linux AIO (`linux/aio_abi.h`), for
containers that forbid io_uring. Both take the same requests and return (tags, results) of completed ones. A result is
the number of bytes read or a negative errno. Queues are not thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import cannot_read
from storage_formats.reading.batch import PIECE_RECORDS, Ints

ENTRIES = 512  # enough to keep a disk busy (docs/lab/storage-io.md); room for four pieces of single records
_FEWEST_ENTRIES = PIECE_RECORDS  # kernels before 5.12 count rings as locked memory, which has a small limit

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture of Linux
_SETUP_CLAMP, _SETUP_COOP_TASKRUN = 1 << 4, 1 << 8
_ENTER_GETEVENTS = 1
_FEATURE_SINGLE_MMAP = 1
_READ = 22
_OFFSET_RINGS, _OFFSET_REQUESTS = 0, 0x10000000
_PARAMETERS = np.dtype(
    [
        *((name, "u4") for name in ("sq_entries", "cq_entries", "flags", "thread_cpu", "thread_idle", "features")),
        ("unused", "u4", 4),
        *((f"sq_{name}", "u4") for name in ("head", "tail", "mask", "entries_at", "flags", "dropped", "array")),
        ("sq_unused", "u4", 3),
        *((f"cq_{name}", "u4") for name in ("head", "tail", "mask", "entries_at", "overflow", "cqes", "flags")),
        ("cq_unused", "u4", 3),
    ]
)
_RING_REQUEST = np.dtype(
    [
        *(("opcode", "u1"), ("flags", "u1"), ("priority", "u2"), ("fd", "i4"), ("offset", "u8"), ("address", "u8")),
        *(("length", "u4"), ("read_flags", "u4"), ("tag", "u8"), ("unused", "u8", 3)),
    ]
)
_RING_COMPLETION = np.dtype([("tag", "u8"), ("result", "i4"), ("flags", "u4")])

_GENERIC = (0, 1, 2, 4)
_AIO_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}
"""(io_setup, io_destroy, io_submit, io_getevents)"""
_AIO_REQUEST = np.dtype(
    [
        *(("tag", "u8"), ("key_and_flags", "u8"), ("opcode", "u2"), ("priority", "i2"), ("fd", "u4")),
        *(("address", "u8"), ("length", "u8"), ("offset", "i8"), ("unused", "u8", 2)),
    ]
)  # little endian, like all architectures above; opcode 0 is a read
_AIO_COMPLETION = np.dtype([("tag", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])


@functools.cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long]
    return function


def system_call(number: int, *arguments: int) -> int:
    """Make a system call without the GIL, and return the result. Raise OSError if the call fails."""
    result = _syscall()(number, *(ctypes.c_long(argument) for argument in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


class Ring:
    """A queue that uses one io_uring.

    Args:
        entries: maximum number of requests in flight.

    Attributes:
        in_flight: number of requests that `wait` has not returned yet.

    Raises:
        OSError: the kernel has no io_uring, or a sandbox forbids io_uring.
    """

    # No memory barrier is needed. Without a polling kernel thread, the kernel reads requests within the system call of
    # the thread that wrote them. This class reads completions only after a system call that waited for them.
    def __init__(self, entries: int) -> None:
        self._fd, parameters = _set_up(entries)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        at = {name: int(parameters[name].flat[0]) for name in _PARAMETERS.names or ()}
        if not at["features"] & _FEATURE_SINGLE_MMAP:
            self._close_fd()
            raise OSError(errno.ENOSYS, "io_uring needs Linux 5.4 or later")
        self.entries = at["sq_entries"]
        length = max(at["sq_array"] + 4 * self.entries, at["cq_cqes"] + _RING_COMPLETION.itemsize * at["cq_entries"])
        rings = mmap.mmap(self._fd, length, offset=_OFFSET_RINGS)
        requests = mmap.mmap(self._fd, _RING_REQUEST.itemsize * self.entries, offset=_OFFSET_REQUESTS)
        self._requests = np.frombuffer(requests, dtype=_RING_REQUEST)
        self._completions = np.frombuffer(rings, dtype=_RING_COMPLETION, count=at["cq_entries"], offset=at["cq_cqes"])
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (
            np.frombuffer(rings, dtype=np.uint32, count=1, offset=at[name])
            for name in ("sq_head", "sq_tail", "cq_head", "cq_tail")
        )
        np.frombuffer(rings, dtype=np.uint32, count=self.entries, offset=at["sq_array"])[:] = range(self.entries)
        self._requests[:] = np.zeros(1, dtype=_RING_REQUEST)
        self._requests["opcode"] = _READ
        self.in_flight = 0
        self._unsubmitted = 0

    def put(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints) -> None:
        """Start one read for each element of the arrays. There must be at most `entries - in_flight` elements.

        Read i transfers `lengths[i]` bytes from byte `offsets[i]` of file descriptor `fds[i]` to the memory at
        `addresses[i]`. This memory must remain allocated until `wait` returns `tags[i]`.
        """
        tail = int(self._sq_tail[0])
        request_indices = np.arange(tail, tail + len(fds)) & (self.entries - 1)
        columns = (("fd", fds), ("offset", offsets), ("address", addresses), ("length", lengths), ("tag", tags))
        for name, column in columns:
            self._requests[name][request_indices] = column
        self._sq_tail[0] = (tail + len(fds)) & 0xFFFFFFFF
        self._unsubmitted += len(fds)
        self.in_flight += len(fds)
        self._enter(0)

    def wait(self, minimum: int) -> tuple[Ints, Ints]:
        """Wait until at least `minimum` requests are complete. Return (tags, results) of all completed requests."""
        minimum = min(minimum, self.in_flight, len(self._completions))
        while self._completed() < minimum:
            self._enter(minimum)
        head, count = int(self._cq_head[0]), self._completed()
        done = self._completions[np.arange(head, head + count) & (len(self._completions) - 1)]
        self._cq_head[0] = (head + count) & 0xFFFFFFFF
        self.in_flight -= count
        return done["tag"].astype(np.int64), done["result"].astype(np.int64)

    def close(self) -> None:
        """Wait until all requests of the queue are complete, and free the queue. May be called repeatedly."""
        # An exception may have come before a request was counted, so `in_flight` may be wrong.
        while self._close_fd.alive and self._sq_head[0] != self._cq_tail[0]:
            to_take = (int(self._sq_head[0]) - int(self._cq_head[0])) & 0xFFFFFFFF
            with contextlib.suppress(InterruptedError):  # a signal came, and its handler has run
                system_call(_ENTER, self._fd, 0, to_take, _ENTER_GETEVENTS, 0, 0)
        self._close_fd()

    def _completed(self) -> int:
        return (int(self._cq_tail[0]) - int(self._cq_head[0])) & 0xFFFFFFFF

    def _enter(self, minimum: int) -> None:
        """Submit all new requests, and wait for `minimum` completions. A signal may end the wait early."""
        try:
            submitted = system_call(_ENTER, self._fd, self._unsubmitted, minimum, _ENTER_GETEVENTS, 0, 0)
            self._unsubmitted -= submitted
        except InterruptedError:
            pass  # a signal came, and its handler has run
        except BlockingIOError:  # no memory for more requests until some complete
            if self.in_flight == self._unsubmitted:
                raise


def _set_up(entries: int) -> tuple[int, NDArray[np.void]]:
    for flags in (_SETUP_CLAMP | _SETUP_COOP_TASKRUN, _SETUP_CLAMP):  # the first needs Linux 5.19
        parameters = np.zeros(1, dtype=_PARAMETERS)
        parameters["flags"] = flags
        try:
            return system_call(_SETUP, entries, parameters.ctypes.data), parameters
        except OSError as error:
            if error.errno != errno.EINVAL or flags == _SETUP_CLAMP:
                raise
    raise AssertionError


class AioQueue:
    """A queue that uses Linux AIO, with the methods of `Ring`. The files must be open for direct I/O.

    Raises:
        OSError: the kernel refuses to create an AIO context.
    """

    def __init__(self, entries: int) -> None:
        self._setup, self._destroy, self._submit, self._getevents = _AIO_CALLS[platform.machine()]
        context = np.zeros(1, dtype=np.int64)
        system_call(self._setup, entries, context.ctypes.data)
        self._context = int(context[0])
        self._owner = os.getpid()
        self._at_end = weakref.finalize(self, _destroy, self._destroy, self._context, self._owner)
        self._completions = np.zeros(entries, dtype=_AIO_COMPLETION)
        self.entries = entries
        self.in_flight = 0
        self._refused: list[tuple[int, int]] = []

    def put(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints) -> None:
        requests = np.zeros(len(fds), dtype=_AIO_REQUEST)  # the kernel copies them
        columns = (("fd", fds), ("offset", offsets), ("address", addresses), ("length", lengths), ("tag", tags))
        for name, column in columns:
            requests[name] = column
        pointers = requests.ctypes.data + np.arange(len(fds)) * _AIO_REQUEST.itemsize
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
            with contextlib.suppress(InterruptedError):  # a signal came, and its handler has run
                count += system_call(
                    self._getevents, self._context, minimum - count, len(free), int(free.ctypes.data), 0
                )
        self.in_flight -= count
        done = self._completions[:count]
        tags, results = done["tag"].astype(np.int64), done["result"].astype(np.int64)
        return np.concatenate([refused[:, 0], tags]), np.concatenate([refused[:, 1], results])

    def close(self) -> None:
        if self._at_end.alive:
            with contextlib.suppress(OSError):  # an earlier call that was interrupted has destroyed the context
                _destroy(self._destroy, self._context, self._owner)
            self._at_end.detach()


def _destroy(number: int, context: int, owner: int) -> None:
    if os.getpid() == owner:  # the context does not belong to a forked child
        system_call(number, context)


@functools.cache
def queue_class() -> type[Ring | AioQueue] | None:
    """Return the kind of queue that this process can use. Containers often forbid io_uring."""
    if sys.platform == "linux":
        kinds: list[type[Ring | AioQueue]] = [Ring, *([AioQueue] if platform.machine() in _AIO_CALLS else [])]
        for kind in kinds:
            with contextlib.suppress(OSError):
                kind(1).close()
                return kind
    return None


class QueuePool:
    """A pool of reusable queues, because creating a queue is slow. Thread-safe.

    In a forked child process the pool is empty.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Ring | AioQueue] = []
        self._owner = os.getpid()

    def borrow(self) -> Ring | AioQueue:
        """Return an idle queue or a new queue. The caller must return the queue with `give_back`.

        Raises:
            MachineError: the kernel refuses to create a queue.
        """
        with self._lock:
            if self._owner != os.getpid():
                self._free, self._owner = [], os.getpid()
            if self._free:
                return self._free.pop()
        kind = queue_class()
        assert kind is not None
        try:
            try:
                return kind(ENTRIES)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                return kind(_FEWEST_ENTRIES)
        except OSError as error:
            raise cannot_read("the token files", error) from error

    def give_back(self, queue: Ring | AioQueue) -> None:
        """Return an idle queue to the pool."""
        with self._lock:
            self._free.append(queue)

    def close(self) -> None:
        """Free the idle queues."""
        with self._lock:
            self._free.clear()
