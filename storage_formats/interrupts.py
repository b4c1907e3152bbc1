"""Cleaning up after an exception that may come between any two instructions.

Python runs signal handlers in the main thread, between instructions, and a handler may raise: Ctrl-C raises
KeyboardInterrupt. An exception can therefore leave a function before it has noted what it started, and can also cut
the cleaning up short. Code whose helpers or requests write into the caller's memory follows this pattern:

    pending = unsettled()
    settle(pending)
    task = ...
    try:
        ...
    except BaseException:
        pending.append(task.abandon)  # one call of compiled code, which no signal handler interrupts
        settle(pending)
        raise

A second exception within microseconds of the first can still leave early, because the interpreter may raise before
the first instruction of `settle`. The task then stays in `pending`, which keeps its memory, and the next read of the
thread waits for it first.

`abandon` waits until nothing writes any more. It must read what is running from state that is true at every
instruction, and may be called again. Locks in such code are `threading.Lock` in a `with` statement or a
`queue.SimpleQueue`: classes written in Python, such as `threading.Condition` and `concurrent.futures.Future`, can be
interrupted between taking their lock and noting it, and then block every other thread for good.
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
    """The `abandon` functions of this thread that have not returned yet. Almost always empty."""
    return _per_thread.unsettled


def settle(pending: Unsettled) -> None:
    """Call every function in `pending` until it returns, and remove it.

    An exception that interrupts this is raised at the end. If exceptions do not stop, the rest stays in `pending`, for
    the next call.
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
