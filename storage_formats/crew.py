"""Helper threads that share a task with the calling thread.

`concurrent.futures` is not used because an exception from a signal handler can leave it locked; see `interrupts`.
Threads of `_thread` are used because `threading.Thread.start` waits on such a lock. They never keep a process alive.
"""

from __future__ import annotations

import _thread
import os
import queue
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_MAX_THREADS = max(64, os.cpu_count() or 1)


class _HelperThreads:
    """Threads that start when they are needed and then wait for further calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle: list[None] = []
        self._started = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` in one of the threads. It must not raise."""
        if len(self._idle) <= self._calls.qsize() and self._started < _MAX_THREADS:
            _thread.start_new_thread(self._run, ())
            self._started += 1
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            self._idle.append(None)
            call = self._calls.get()
            self._idle.pop()
            call()
            del call  # an idle thread must not keep the memory of its last task


class Crew(Generic[_Item]):
    """Calls `work` for every item, in the calling thread and in helper threads.

    Args:
        work: called from several threads at a time.
        items: the items, each passed to `work` once.
    """

    def __init__(self, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
        self._work = work
        self._items = iter(items)
        self._closed = False
        self._running: list[None] = []  # one entry per helper at work
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []

    def start(self, helpers: int) -> None:
        """Have `helpers` threads work on the items too."""
        for _ in range(helpers):
            _threads.submit(self._help)

    def finish(self) -> None:
        """Work until no item is left, wait for the helpers, and raise the first error of one."""
        for item in self._items:
            self._work(item)
        self.abandon()
        if self._errors:
            raise self._errors[0]

    def abandon(self) -> None:
        """Stop after the items in progress, and wait for the helpers. A helper that starts later does nothing."""
        self._closed = True
        while self._running:  # a helper leaves the list before it reports its end, so none is waited for in vain
            self._ended.get()

    def _help(self) -> None:
        self._running.append(None)  # before `_closed` is read: `abandon` writes and reads in the opposite order
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


def _forget_threads() -> None:
    global _threads
    _threads = _HelperThreads()  # its threads did not survive the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
