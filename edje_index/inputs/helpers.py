"""Helper processes, which prepare inputs beside the process that runs the model.

`Helpers` starts one server process. The server imports everything that preparation
needs, and forks a helper process whenever one is requested. So a helper starts in
milliseconds, and helpers share the memory of the libraries. The server has no torch, no
threads and no standard input or output.

The helpers write pixels to memory that they share with this process. Messages contain
only inputs and columns of the rows table. A helper marks each input that it works on in
the shared memory. If a helper dies or hangs, the mark names the input that is to blame.

If this process dies, the server reads the end of its socket and exits, and the kernel
then kills the helpers.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import mmap
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
from PIL import Image

from edje_index.images.decode import decode_rgb
from edje_index.inputs.preparation import Columns, Job, Pixels, Preparation, failed
from edje_index.inputs.refs import InputRef
from storage_formats.errors import EdjeError
from storage_formats.remote.urls import is_url

MESSAGE_INPUTS = 32
"""Largest number of inputs in a message to a helper."""

INPUT_SECONDS = 120.0
"""A helper that works on one input for this time is killed, and the input fails with
the reason "timed-out".
"""

SLOW_FACTOR = 5
"""An input on a server, or a clip, may take `SLOW_FACTOR` times `INPUT_SECONDS`."""

REMOTE_THREADS = 16
"""Number of inputs on servers that are read at once, so that requests overlap."""

_POLL_SECONDS = 0.2
# If this number of helpers in a row die before they begin an input, helpers cannot run
# on this machine.
_MAX_STARTS = 5
_SERVE = "import sys; sys.path[:] = {!r}; from {} import serve; serve(*{!r})"
# option of prctl(2), from <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
# values of a mark in the shared memory
_WAITS = 0
_RUNS = 1
_ENDED = 2


@dataclass
class _Helper:
    number: int
    connection: Connection | None = None
    process: int = 0


class Threads:
    """Prepares inputs as `Helpers` does, but in the threads of this process that call
    `prepare`. Thread-safe.

    Args:
        count, preparation, positions: see `Helpers`.

    Attributes:
        pixels: memory for prepared inputs, see `Helpers`.
    """

    def __init__(self, count: int, preparation: Preparation, positions: int) -> None:
        self.count = count
        self._preparation = preparation
        size = positions * math.prod(preparation.shape)
        # A GPU pins whole pages, so the memory shares no page with other objects.
        memory = np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)[:size]
        self.pixels = memory.reshape(positions, *preparation.shape)
        self._remote_threads = ThreadPoolExecutor(REMOTE_THREADS, "edje-read")

    def close(self) -> None:
        """End the threads that read inputs on servers."""
        self._remote_threads.shutdown()

    def prepare(self, jobs: Iterable[Job]) -> list[Columns]:
        """Prepare inputs, write their pixels to `self.pixels`, and return their
        columns.

        Raises:
            TransientInputError: see `Preparation.run`.
        """
        return _prepare(
            self._preparation, list(jobs), self.pixels, {}, self._remote_threads
        )


def _prepare(
    preparation: Preparation,
    jobs: list[Job],
    pixels: Pixels,
    marks: Any,
    threads: ThreadPoolExecutor,
) -> list[Columns]:
    """Prepare inputs one by one, or in `threads` if some are on servers. The mark of
    each input says how far it is.
    """

    def run(index: int, job: Job) -> Columns:
        position, ref = job
        marks[index] = _RUNS
        columns = preparation.run(ref, pixels[position])
        marks[index] = _ENDED
        return columns

    is_remote = any(is_url(ref.path) for _, ref in jobs)
    run_all = threads.map if is_remote else map
    return [*run_all(run, itertools.count(), jobs)]


class Helpers:
    """`count` helper processes. Thread-safe.

    Args:
        count: number of helpers, and of threads that may call `prepare` at once.
        preparation: how inputs are prepared.
        positions: number of inputs whose pixels fit into the shared memory.
        seconds: see `INPUT_SECONDS`.

    Attributes:
        pixels: shared memory for prepared inputs, uint8 [positions,
            *preparation.shape].
    """

    def __init__(
        self,
        count: int,
        preparation: Preparation,
        positions: int = 0,
        seconds: float = INPUT_SECONDS,
    ) -> None:
        self.count = count
        self._preparation = preparation
        self._seconds = seconds
        # Both kinds of file are gone when the last process that uses them ends. The
        # size of /dev/shm limits neither.
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("edje-helpers")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.pixels, self._marks = _map(self._file, count, positions, preparation.shape)
        self._idle: queue.SimpleQueue[_Helper] = queue.SimpleQueue()
        for number in range(count):
            self._idle.put(_Helper(number))
        # A thread that borrows all helpers holds the lock, so that two such threads do
        # not wait for each other.
        self._borrowing = threading.Lock()
        self._starting = threading.Lock()
        self._start_server()

    def close(self) -> None:
        """End the server and the helpers."""
        self._end_server()

    def prepare(self, jobs: Iterable[Job]) -> list[Columns]:
        """Prepare at most `MESSAGE_INPUTS` inputs, write their pixels to
        `self.pixels`, and return their columns.

        An input at which a helper dies is tried again while no other helper works, so
        that all memory is free for it. If a helper dies again, the input has failed.

        Raises:
            TransientInputError: see `Preparation.run`.
            EdjeError: helpers cannot start.
        """
        jobs = list(jobs)
        if not jobs:
            return []
        columns: dict[int, Columns] = {}
        with self._borrowed(1) as (helper,):
            suspects = self._try(helper, jobs, columns)
        for job in suspects:
            with self._borrowed(self.count) as (helper, *_):
                if self._try(helper, [job], columns):
                    columns[job[0]] = failed(
                        "worker-died",
                        "the process that read and decoded the input died twice: a"
                        " crash in native code, or too little memory",
                    )
        return [columns[position] for position, _ in jobs]

    @contextmanager
    def _borrowed(self, count: int) -> Iterator[list[_Helper]]:
        with self._borrowing:
            helpers = [self._idle.get() for _ in range(count)]
        try:
            yield helpers
        finally:
            for helper in helpers:
                self._idle.put(helper)

    def _try(
        self, helper: _Helper, jobs: list[Job], columns: dict[int, Columns]
    ) -> list[Job]:
        """Prepare `jobs`, and add their columns to `columns`, by position. Return the
        jobs at which the helper died. They get no columns.
        """
        limit = self._seconds
        if self._preparation.decoding.frames or any(
            is_url(ref.path) for _, ref in jobs
        ):
            limit *= SLOW_FACTOR
        suspects: list[Job] = []
        # Every attempt but `_MAX_STARTS` takes a job away.
        for _ in range(len(jobs) + _MAX_STARTS):
            marks = self._marks[helper.number, : len(jobs)]
            marks[:] = _WAITS
            seconds = np.zeros(len(jobs))
            try:
                connection = self._connected(helper)
                connection.send([(index, ref.location) for index, ref in jobs])
                # If this process is paused (Ctrl-Z), the time of the pause does not
                # count.
                while not connection.poll(_POLL_SECONDS) and seconds.max() < limit:
                    seconds = (seconds + _POLL_SECONDS) * (marks == _RUNS)
                if seconds.max() >= limit:
                    os.kill(helper.process, signal.SIGKILL)
                answer = connection.recv()
            except (EOFError, OSError):
                helper.connection = None
            else:
                if isinstance(answer, Exception):
                    raise answer
                positions = [position for position, _ in jobs]
                columns.update(zip(positions, answer, strict=True))
                return suspects
            hung = seconds >= limit
            blames = hung if hung.any() else marks == _RUNS
            blamed = list(itertools.compress(jobs, blames))
            jobs = list(itertools.compress(jobs, ~blames))
            if hung.any():
                detail = f"it was not read and decoded within {limit:g} seconds"
                columns |= {at: failed("timed-out", detail) for at, _ in blamed}
            else:
                suspects += blamed
            if not jobs:
                return suspects
        raise EdjeError("helper processes die before they begin an input")

    def _connected(self, helper: _Helper) -> Connection:
        """Return the connection to `helper`, which is started if it does not run."""
        if helper.connection is None:
            with self._starting:
                helper.connection, theirs = Pipe()
                with theirs:
                    try:
                        self._control.send(helper.number)
                        send_handle(self._control, theirs.fileno(), self._server.pid)
                    except OSError:
                        # The server has died.
                        self._end_server()
                        self._start_server()
                        raise
            helper.process = helper.connection.recv()
        return helper.connection

    def _start_server(self) -> None:
        self._control, theirs = Pipe()
        arguments = (theirs.fileno(), self._file)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(sys.path, __name__, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=arguments,
                # Ctrl-C is a signal to the process group of this process. It must not
                # end the helpers.
                start_new_session=True,
            )
        # Also called if this object is not closed, at the latest at the end of the
        # process.
        self._end_server = weakref.finalize(self, _end, self._server, self._control)
        # If the server has died already, its first use finds out.
        with suppress(OSError):
            self._control.send((self._preparation, self.count, len(self.pixels)))


def _end(server: subprocess.Popen[bytes], control: Connection) -> None:
    control.close()
    server.kill()
    server.wait()


def _map(
    file: int, count: int, positions: int, shape: tuple[int, ...]
) -> tuple[Pixels, Pixels]:
    """Return the pixels [positions, *shape] and the marks [count, MESSAGE_INPUTS] in
    the shared memory.
    """
    size = positions * math.prod(shape)
    length = size + count * MESSAGE_INPUTS
    os.ftruncate(file, length)
    memory = np.frombuffer(mmap.mmap(file, length), np.uint8)
    return (
        memory[:size].reshape(positions, *shape),
        memory[size:].reshape(count, MESSAGE_INPUTS),
    )


def serve(control_file: int, memory_file: int) -> None:
    """Main function of the server process. Fork a helper for each request."""
    control = Connection(control_file)
    preparation, count, positions = control.recv()
    pixels, marks = _map(memory_file, count, positions, preparation.shape)
    if preparation.preprocess is not None:
        # Load all decoders and kernels before the first fork.
        photo = io.BytesIO()
        Image.new("RGB", (64, 64)).save(photo, "JPEG")
        preparation.preprocess.array(decode_rgb(photo.getvalue()))
    # The kernel removes ended helpers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = os.getpid()
    with suppress(EOFError):
        while True:
            number = control.recv()
            connection = Connection(recv_handle(control))
            if os.fork() == 0:
                control.close()
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == server:
                    _help(connection, preparation, pixels, marks[number], count)
                os._exit(0)
            connection.close()


def _help(
    connection: Connection,
    preparation: Preparation,
    pixels: Pixels,
    marks: Pixels,
    count: int,
) -> None:
    """Main function of a helper process. Answer messages until the end of
    `connection`.
    """
    connection.send(os.getpid())
    threads = ThreadPoolExecutor(-(-REMOTE_THREADS // count))
    with suppress(EOFError, OSError):
        while True:
            jobs = [(at, InputRef(*location)) for at, location in connection.recv()]
            answer: list[Columns] | Exception
            try:
                answer = _prepare(preparation, jobs, pixels, marks, threads)
            except Exception as error:
                answer = error
            connection.send(answer)
