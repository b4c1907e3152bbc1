"""Helper threads that share the work of the calling thread, cleanup after an exception
from a signal handler, and the number of CPUs that this process may use.

An exception that a signal handler raises, for example KeyboardInterrupt after Ctrl-C,
can come between any two instructions of the main thread. It can end a function that has
started a task but has not recorded the task yet, and it can interrupt the cleanup.
Helper threads or kernel requests may then continue to write to the caller's memory.
Code that starts such threads or requests therefore follows this pattern:

    pending = unsettled()
    settle(pending)
    task = ...
    try:
        ...
    except BaseException:
        # one call of compiled code, which no signal handler interrupts
        pending.append(task.abandon)
        settle(pending)
        raise

`task.abandon` waits until the task has stopped writing, and may be called repeatedly.
If another exception interrupts the cleanup, `task.abandon` remains in `pending`, and
the next use of this pattern in the same thread calls it.

An exception from a signal handler can also interrupt a class that is written in Python,
for example `threading.Condition`, while it holds a lock. The lock then stays locked for
ever. Code with this pattern therefore uses only locks and queues that are written in C:
`threading.Lock` and `threading.RLock` in `with` statements, and `queue.SimpleQueue`. So
it does not use `concurrent.futures`. It does not use the thread pools of Numba either,
because they abort a process that forks or that calls them from two threads.

An alternative to this pattern is a separate thread for each fetch, because an exception
from a signal handler only interrupts the main thread. A fetch of 100 blocks from the
page cache would then take 5 % longer.
"""

from __future__ import annotations

import _thread
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
from typing import Any, Generic, TypeAlias, TypeVar

from storage_formats.cgroups import cgroup_files

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Unsettled: TypeAlias = list[Callable[[], None]]

_MAX_THREADS = max(64, os.cpu_count() or 1)
# number of exceptions after which `settle` gives up
_ATTEMPTS = 10_000
# Size in bytes of the bfloat16 blocks that a thread converts at a time. Converting them
# takes about 0.3 ms, much longer than handing the work to the thread.
_CHUNK_BYTES = 2 << 20
# LLVM's names of processor features: the first two are of x86, the last is of ARM
_BFLOAT16_FEATURES = ("avx512bf16", "amx-bf16", "bf16")


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.unsettled: Unsettled = []


_per_thread = _PerThread()


def unsettled() -> Unsettled:
    """Return the list of the `abandon` functions that the calling thread has still to
    complete. The list is almost always empty.
    """
    return _per_thread.unsettled


def settle(pending: Unsettled) -> None:
    """Call each function in `pending` until the call succeeds, and remove the function
    from `pending`.

    If an exception interrupts a function, the function is called again. The last
    exception is raised at the end. After 10,000 exceptions, the remaining functions are
    left in `pending` for the next call of `settle`.
    """
    interruption: BaseException | None = None
    attempts = 0
    while pending and attempts < _ATTEMPTS:
        try:
            pending[-1]()
            pending.pop()
        except BaseException as error:
            interruption = error
            attempts += 1
    if interruption is not None:
        raise interruption


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

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` in a helper thread, or never if no thread can be started. `call`
        must not raise.
        """
        if len(self._idle) <= self._calls.qsize() and self._started < _MAX_THREADS:
            try:
                _thread.start_new_thread(self._run, ())
                self._started += 1
            except RuntimeError:
                # The system allows no further thread. A running helper thread takes
                # the call later, or the calling thread of `Crew` has done all by then.
                pass
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            self._idle.append(None)
            call = self._calls.get()
            self._idle.pop()
            call()
            # an idle thread must not keep the memory of its last task
            del call


class Crew(Generic[_Item]):
    """Calls `work(item)` once for each of `items`, in the calling thread and in helper
    threads.

    Args:
        work: thread-safe function that processes one item.
    """

    def __init__(self, work: Callable[[_Item], object], items: Iterable[_Item]) -> None:
        self._work = work
        self._items = iter(items)
        self._closed = False
        # one entry per running helper thread
        self._running: list[None] = []
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []

    def start(self, helpers: int) -> None:
        """Start up to `helpers` helper threads, which begin to process items."""
        for _ in range(helpers):
            _threads.submit(self._help)

    def finish(self) -> None:
        """Process items until none is left, wait for the helper threads, and then
        raise the first error of a helper thread, if there is one.

        An error of `work` in the calling thread is raised at once. The caller must then
        call `abandon`.
        """
        for item in self._items:
            self._work(item)
        self.abandon()
        if self._errors:
            raise self._errors[0]

    def abandon(self) -> None:
        """Stop each helper thread after its current item, and wait until all have
        stopped.
        """
        self._closed = True
        # A helper removes its entry from `_running` before it reports to `_ended`. So
        # while there is an entry, a report is still to come.
        while self._running:
            self._ended.get()

    def _help(self) -> None:
        # A helper adds its entry before it reads `_closed`, and `abandon` sets
        # `_closed` before it reads `_running`. So either `abandon` waits for this
        # helper, or this helper stops.
        self._running.append(None)
        try:
            for item in self._items:
                if self._closed:
                    break
                self._work(item)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._running.pop()
            self._ended.put(None)


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
    pending = unsettled()
    crew = Crew(work, items)
    try:
        crew.start(threads - 1)
        crew.finish()
    except BaseException:
        pending.append(crew.abandon)
        settle(pending)
        raise


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
    limit = default_threads() if threads is None else threads
    chunk_count = max(1, -(-count * block_bytes // _CHUNK_BYTES))
    # round up, so that each thread gets the same number of parts
    chunk_count += -chunk_count % min(limit, chunk_count)
    chunk = max(1, -(-count // chunk_count))
    starts = range(0, count, chunk)
    run_threads(
        lambda start: work(start, min(start + chunk, count)),
        starts,
        min(limit, len(starts)),
    )


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
            items, lambda item: pool.submit(work, item), ahead=ahead
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
