"""Helper threads that work on a task together with the calling thread.

This module does not use `concurrent.futures`: an exception from a signal handler can leave the locks of that
package taken (see `interrupts`). Helper threads do not keep the process alive.
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
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle: list[None] = []
        self._started = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` in a helper thread. `call` must not raise."""
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
    """Calls `work(item)` once for each of `items`, in the calling thread and in helper threads.

    Args:
        work: thread-safe function that processes one item.
        items: the items to process.
    """

    def __init__(self, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
        self._work = work
        self._items = iter(items)
        self._closed = False
        self._running: list[None] = []  # one entry per running helper
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []

    def start(self, helpers: int) -> None:
        """Start up to `helpers` helper threads, which begin to process items."""
        for _ in range(helpers):
            _threads.submit(self._help)

    def finish(self) -> None:
        """Process items until none is left, and wait for the helper threads. Raise the first error of a helper."""
        for item in self._items:
            self._work(item)
        self.abandon()
        if self._errors:
            raise self._errors[0]

    def abandon(self) -> None:
        """Stop each helper thread after its current item, and wait until all have stopped."""
        self._closed = True
        while self._running:  # a helper first leaves `_running`, then reports to `_ended`
            self._ended.get()

    def _help(self) -> None:
        self._running.append(None)  # before reading `_closed`; `abandon` sets `_closed` before reading `_running`
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
