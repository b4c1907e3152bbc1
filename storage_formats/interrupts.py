"""Cleanup after an exception that may be raised between any two instructions.

Python runs signal handlers in the main thread, between instructions. A handler may raise: Ctrl-C raises
KeyboardInterrupt. An exception can therefore end a function before the function has recorded what it started. An
exception can also interrupt the cleanup. Code that starts helper threads or kernel requests which write into the
caller's memory follows this pattern:

    pending = unsettled()
    settle(pending)
    task = ...
    try:
        ...
    except BaseException:
        pending.append(task.abandon)  # one call of compiled code, which no signal handler interrupts
        settle(pending)
        raise

A second exception within microseconds of the first can still prevent the cleanup, because the interpreter may raise
before the first instruction of `settle`. The task then stays in `pending`, which keeps the task's memory alive. The
next read in the same thread waits for the task first.

`abandon` waits until the task has stopped writing, and may be called repeatedly. It must determine what is running from
state that is correct at every instruction. The only locks in such code are `threading.Lock` in a `with` statement and
`queue.SimpleQueue`. Classes written in Python, such as `threading.Condition` and `concurrent.futures.Future`, can be
interrupted after they take their lock and before they record that they hold it. They then block every other thread for
ever.
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
