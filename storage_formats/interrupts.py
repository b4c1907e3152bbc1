"""Cleanup after an exception that a signal handler raises, for example KeyboardInterrupt after Ctrl-C.

The exception can come between any two instructions of the main thread. The exception can end a function that has
started a task but not recorded the task yet. The exception can also interrupt the cleanup. Code that starts helper
threads or kernel requests that write to the caller's memory follows this pattern:

    pending = unsettled()
    settle(pending)
    task = ...
    try:
        ...
    except BaseException:
        pending.append(task.abandon)  # one call of compiled code, which no signal handler interrupts
        settle(pending)
        raise

`task.abandon` waits until the task has stopped writing, and may be called repeatedly. If another exception interrupts
the cleanup, `task.abandon` remains in `pending`, and the next use of this pattern in the same thread calls it.

Code with this pattern uses no locks except `threading.Lock` in a `with` statement and `queue.SimpleQueue`. An exception
can leave the lock of a class written in Python, for example `threading.Condition`, taken for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Unsettled: TypeAlias = list[Callable[[], None]]

_ATTEMPTS = 10_000  # reached only if an exception interrupts every attempt


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.unsettled: Unsettled = []


_per_thread = _PerThread()


def unsettled() -> Unsettled:
    """Return the `abandon` functions of this thread that have not completed yet. The list is almost always empty."""
    return _per_thread.unsettled


def settle(pending: Unsettled) -> None:
    """Call each function in `pending` until the call succeeds, and remove the function from `pending`.

    If an exception interrupts a function, the function is called again. The last exception is raised at the end. After
    10,000 exceptions, the remaining functions are left in `pending` for the next call of `settle`.
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
