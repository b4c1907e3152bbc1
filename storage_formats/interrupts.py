"""Cleanup after an exception that may be raised between any two instructions.

A signal handler may raise in the main thread at any instruction: Ctrl-C raises KeyboardInterrupt. Such an exception can
end a function before it has recorded what it started, and it can interrupt the cleanup. Code that starts helper threads
or kernel requests which write into the caller's memory follows this pattern:

    pending = unsettled()
    settle(pending)
    task = ...
    try:
        ...
    except BaseException:
        pending.append(task.abandon)  # one call of compiled code, which no signal handler interrupts
        settle(pending)
        raise

`abandon` waits until the task has stopped writing, and may be called repeatedly. If another exception prevents the
cleanup, the task stays in `pending`, and the next read in the same thread waits for it.

Such code uses only `threading.Lock` in a `with` statement and `queue.SimpleQueue`. An exception can leave the locks of
classes written in Python, such as `threading.Condition`, taken for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Unsettled: TypeAlias = list[Callable[[], None]]

_ATTEMPTS = 10_000  # only exceptions that never end take as many


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.unsettled: Unsettled = []


_per_thread = _PerThread()


def unsettled() -> Unsettled:
    """Return the list of this thread's `abandon` functions that have not returned yet. It is almost always empty."""
    return _per_thread.unsettled


def settle(pending: Unsettled) -> None:
    """Call each function in `pending` until it returns, then remove it from `pending`.

    A function that an exception interrupts is called again, and the last exception is raised at the end. After 10,000
    exceptions, the remaining functions stay in `pending` for the next call.
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
