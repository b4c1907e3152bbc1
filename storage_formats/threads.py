"""Helper threads that share the work of the calling thread, and the number of CPUs that
this process may use.

An exception that a signal handler raises, for example KeyboardInterrupt after Ctrl-C,
can come between any two instructions of the main thread. Helper threads must not write
to the caller's memory after such an exception. So the functions of this module that
start helper threads end in a `finally` block that waits for them. The block waits with
a lock of the C API of Python, which no signal handler interrupts, and not with a method
written in Python, which an exception could end before the wait. Code that cannot be
interrupted at any instruction, for example because it starts requests of the kernel,
runs in a helper thread, see `run_apart`.

The thread pools of Numba are not used, because they abort a process that forks or that
calls them from two threads.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from storage_formats.cgroups import cgroup_files

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MAX_THREADS = max(64, os.cpu_count() or 1)
# Size in bytes of the bfloat16 blocks that a thread converts at a time. Converting them
# takes about 0.3 ms, much longer than handing the work to the thread.
_CHUNK_BYTES = 2 << 20
# LLVM's names of processor features: the first two are of x86, the last is of ARM
_BFLOAT16_FEATURES = ("avx512bf16", "amx-bf16", "bf16")


# These functions belong to the stable ABI of CPython. The GIL is released while they
# run, as for any function of a `CDLL`.
_python = ctypes.CDLL(None, handle=ctypes.pythonapi._handle)
_new_lock: Any = _python.PyThread_allocate_lock
_new_lock.restype = ctypes.c_void_p
_acquire: Any = _python.PyThread_acquire_lock
_acquire.argtypes = [ctypes.c_void_p, ctypes.c_int]
_release: Any = _python.PyThread_release_lock
_release.argtypes = [ctypes.c_void_p]
# locks that no crew uses; all are acquired
_idle_locks: list[int] = []


class _HelperThreads:
    """A pool of threads that wait for tasks. The threads do not keep the process alive
    when the main thread ends.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # One entry per idle thread. The list is a counter: appending and removing an
        # entry are atomic, and `+=` on a number is not.
        self._idle: list[None] = []
        self._started = 0

    def submit(self, call: Callable[[], None]) -> bool:
        """Run `call` in a helper thread as soon as one is idle. `call` must not raise.
        Return False if there is no helper thread, so that `call` may never run.
        """
        if len(self._idle) <= self._calls.qsize() and self._started < _MAX_THREADS:
            # If the system allows no further thread, a running helper takes the call.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._run, ())
                self._started += 1
        self._calls.put(call)
        return self._started > 0

    def _run(self) -> None:
        while True:
            self._idle.append(None)
            call = self._calls.get()
            self._idle.pop()
            call()
            # an idle thread must not keep the memory of its last task
            del call


class _Crew(Generic[_Item]):
    """Calls `work(item)` once for each of `items`, in helper threads and in each thread
    that calls `process`.

    Attributes:
        is_closed: whether each thread stops after its current item.
        running: one entry per helper thread that processes items.
        ended: lock that the last helper thread of a closed crew releases.
        errors: the errors of helper threads.
    """

    def __init__(
        self, work: Callable[[_Item], object], items: Iterable[_Item], helpers: int
    ) -> None:
        self._work = work
        self._items = iter(items)
        self.is_closed = False
        self.running: list[None] = []
        self.errors: list[BaseException] = []
        # one entry per thread that may still use the lock
        self._users = [True] + [False] * helpers
        # The lock of an earlier crew is used again. It is not freed by a destructor: if
        # a signal handler raises an exception while a destructor runs, Python drops the
        # exception.
        try:
            self.ended = _idle_locks.pop()
        except IndexError:
            self.ended = _new_lock()
            _acquire(self.ended, 1)

    def process(self) -> None:
        """Process items until none is left."""
        for item in self._items:
            if self.is_closed:
                break
            self._work(item)

    def help(self) -> None:
        """Process items in a helper thread."""
        # A helper adds its entry before it reads `is_closed`, and the thread that ends
        # the work sets `is_closed` before it reads `running`. So either that thread
        # waits for this helper, or this helper stops.
        self.running.append(None)
        try:
            self.process()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.running.pop()
            if self.is_closed and not self.running:
                _release(self.ended)
            self.leave()

    def leave(self) -> None:
        """Note that the calling thread does not use the lock any more. The last thread
        passes the lock on.
        """
        # the first entry is taken last, and only by one thread
        if self._users.pop():
            while _acquire(self.ended, 0):
                pass
            _idle_locks.append(self.ended)


_threads = _HelperThreads()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe_lock() -> threading.RLock:
    """Return a new lock that is free in a forked child process, even if another thread
    of the parent process holds it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _repair_child() -> None:
    global _threads
    # the threads of the parent process do not exist in a forked child process
    _threads = _HelperThreads()
    for lock in _locks:
        # The standard library resets its own locks with this method. No public method
        # frees a lock that a vanished thread holds.
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_repair_child)


def run_threads(
    work: Callable[[_Item], object], items: Sequence[_Item], threads: int
) -> None:
    """Call `work(item)` for each of `items` on at most `threads` threads, including the
    calling thread.

    If a call raises an exception, the exception is raised after all running calls have
    ended.
    """
    if threads < 2:
        for item in items:
            work(item)
        return
    crew = _Crew(work, items, threads - 1)
    try:
        for _ in range(threads - 1):
            _threads.submit(crew.help)
        crew.process()
    finally:
        crew.is_closed = True
        if crew.running:
            _acquire(crew.ended, 1)
    crew.leave()
    if crew.errors:
        raise crew.errors[0]


def run_apart(steps: Generator[None, None, None]) -> None:
    """Run a generator to its end, in a helper thread if the calling thread is the main
    thread.

    If a signal handler raises an exception meanwhile, the generator is closed at its
    next `yield`, and the exception is raised after that.
    """
    if threading.current_thread() is not threading.main_thread():
        deque(steps, maxlen=0)
        return
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(_: None) -> None:
        try:
            for _ in steps:
                if crew.is_closed:
                    break
        finally:
            steps.close()
            ended.put(None)

    crew = _Crew(run, [None], 1)
    try:
        if _threads.submit(crew.help):
            ended.get()
        else:
            deque(steps, maxlen=0)
    finally:
        crew.is_closed = True
        if crew.running:
            _acquire(crew.ended, 1)
    crew.leave()
    if crew.errors:
        raise crew.errors[0]


def default_threads() -> int:
    """Return the number of CPUs that this process may use, limited by the environment
    variable `OMP_NUM_THREADS`.
    """
    cpus = usable_cpus()
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, min(cpus, int(limit))) if limit.isdigit() else cpus


def run_chunks(
    work: Callable[[int, int], object],
    count: int,
    block_bytes: int,
    threads: int | None,
) -> None:
    """Split range(count) into consecutive parts and call `work(start, stop)` for each
    part, see `run_threads`.

    Args:
        work: function `(start, stop)` that converts blocks [start, stop).
        block_bytes: length of one decoded block in bytes. This length determines the
            number of parts.
        threads: maximum number of threads, including the calling thread. None means
            `default_threads()`.
    """
    chunk_count = max(1, -(-count * block_bytes // _CHUNK_BYTES))
    if count and chunk_count == 1:
        work(0, count)
        return
    limit = default_threads() if threads is None else threads
    # round up, so that each thread gets the same number of parts
    chunk_count += -chunk_count % min(limit, chunk_count)
    chunk = max(1, -(-count // chunk_count))
    starts = range(0, count, chunk)
    run_threads(
        lambda start: work(start, min(start + chunk, count)),
        starts,
        min(limit, len(starts)),
    )


def submit(
    pool: ThreadPoolExecutor, work: Callable[[_Item], _Result], item: _Item
) -> Future[_Result]:
    """Submit `work(item)` to `pool`. If the system allows no further thread, the
    calling thread does this work and all later work, and the pool ends.
    """
    try:
        return pool.submit(work, item)
    except RuntimeError:
        # The pool has queued the item nevertheless. The threads that did start finish
        # the queue first, because two threads must not work on one item at once. If
        # there is such a thread, the calling thread does the item once more.
        pool.shutdown()
    result: Future[_Result] = Future()
    try:
        result.set_result(work(item))
    except Exception as error:
        result.set_exception(error)
    return result


def ordered_results(
    items: Iterable[_Item], submit: Callable[[_Item], Future[_Result]], *, ahead: int
) -> Iterator[_Result]:
    """Yield the result of `submit(item)` for each of `items`, in the order of `items`.

    Args:
        items: the items. The next item is taken only when it is submitted.
        ahead: number of items that are submitted before the first result is yielded.
            Each time the caller requests a further result, one more item is submitted.
    """
    pending: deque[Future[_Result]] = deque()
    for item in items:
        pending.append(submit(item))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def ordered_map(
    work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int, ahead: int
) -> Generator[_Result, None, None]:
    """Yield `work(item)` for each of `items`, in order. A pool of `threads` threads
    calls `work` for at most `ahead` items before their results are consumed.
    """
    pool = ThreadPoolExecutor(threads, "edje-ahead")
    waits = True
    try:
        yield from ordered_results(
            items, lambda item: submit(pool, work, item), ahead=ahead
        )
    except KeyboardInterrupt:
        # A thread may hang in a read, and Ctrl-C must not wait for it.
        waits = False
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)


def usable_cpus(machine: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use. The CPU quotas of its
    cgroups, for example of a container, limit the number.

    `machine` is the root directory from which the quotas are read.
    """
    cpus = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return min(cpus, _quota(machine))


@functools.cache
def has_bfloat16() -> bool:
    """Return True if the processor has instructions for products of bfloat16
    matrices.
    """
    from llvmlite import binding  # type: ignore[import-untyped]

    features = binding.get_host_cpu_features()
    return any(features.get(name, False) for name in _BFLOAT16_FEATURES)


# The result is cached, because each fetch calls this function. A later change of the
# quota is not noticed.
@functools.cache
def _quota(machine: Path) -> int:
    """Return the number of CPUs that all cgroups of this process allow, at least 1;
    a huge number if there is no limit.
    """
    quota = sys.maxsize
    for texts in cgroup_files(
        machine, "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)
    ):
        allowed, _, period = " ".join(texts).partition(" ")
        if allowed.isdigit() and period.isdigit():
            quota = min(quota, max(1, int(allowed) // int(period)))
    return quota
