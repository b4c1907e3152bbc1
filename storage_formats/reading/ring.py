"""io_uring through system calls. One thread can have many reads in flight.

The interface of the kernel is two rings in shared memory and one system call (Axboe, "Efficient IO with io_uring",
2019; `linux/io_uring.h`). This module writes many requests at once as rows of a structured array. One call of a library
per request would be slower (docs/lab/storage-io.md).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import sys
import weakref

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.base import Ints
from storage_formats.reading.syscalls import system_call

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
_REQUEST = np.dtype(
    [
        *(("opcode", "u1"), ("flags", "u1"), ("priority", "u2"), ("fd", "i4"), ("offset", "u8"), ("address", "u8")),
        *(("length", "u4"), ("read_flags", "u4"), ("tag", "u8"), ("unused", "u8", 3)),
    ]
)
_COMPLETION = np.dtype([("tag", "u8"), ("result", "i4"), ("flags", "u4")])


class Ring:
    """A `queues.Queue` that uses one io_uring with room for `entries` requests.

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
        length = max(at["sq_array"] + 4 * self.entries, at["cq_cqes"] + _COMPLETION.itemsize * at["cq_entries"])
        rings = mmap.mmap(self._fd, length, offset=_OFFSET_RINGS)
        requests = mmap.mmap(self._fd, _REQUEST.itemsize * self.entries, offset=_OFFSET_REQUESTS)
        self._requests = np.frombuffer(requests, dtype=_REQUEST)
        self._completions = np.frombuffer(rings, dtype=_COMPLETION, count=at["cq_entries"], offset=at["cq_cqes"])
        self._sq_head = np.frombuffer(rings, dtype=np.uint32, count=1, offset=at["sq_head"])
        self._sq_tail = np.frombuffer(rings, dtype=np.uint32, count=1, offset=at["sq_tail"])
        self._cq_head = np.frombuffer(rings, dtype=np.uint32, count=1, offset=at["cq_head"])
        self._cq_tail = np.frombuffer(rings, dtype=np.uint32, count=1, offset=at["cq_tail"])
        np.frombuffer(rings, dtype=np.uint32, count=self.entries, offset=at["sq_array"])[:] = range(self.entries)
        self._requests[:] = np.zeros(1, dtype=_REQUEST)
        self._requests["opcode"] = _READ
        self.in_flight = 0
        self._unsubmitted = 0

    def put(self, fds: Ints, offsets: Ints, addresses: Ints, lengths: Ints, tags: Ints) -> None:
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
        minimum = min(minimum, self.in_flight, len(self._completions))
        while self._completed() < minimum:
            self._enter(minimum)
        head, count = int(self._cq_head[0]), self._completed()
        done = self._completions[np.arange(head, head + count) & (len(self._completions) - 1)]
        self._cq_head[0] = (head + count) & 0xFFFFFFFF
        self.in_flight -= count
        return done["tag"].astype(np.int64), done["result"].astype(np.int64)

    def close(self) -> None:
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


@functools.cache
def io_uring_works() -> bool:
    """Return True if this process can use io_uring. Containers often forbid it."""
    if sys.platform != "linux":
        return False
    try:
        Ring(1)
    except OSError:
        return False
    return True
