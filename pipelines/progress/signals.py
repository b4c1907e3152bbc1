"""Signals that ask for a stop: the first one politely, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Turns true, once and for all, when a stop is asked for."""

    def __init__(self) -> None:
        self._signals = 0

    def __call__(self) -> bool:
        return self._signals > 0

    def set(self) -> int:
        """Ask for a stop; returns how often that has been done."""
        self._signals += 1
        return self._signals


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """A flag that SIGINT, SIGTERM or SIGHUP sets, with a line on standard error; one that is ignored stays so.

    A second signal raises KeyboardInterrupt, a third ends the process on the spot. In a thread other than the main
    one the flag is there and no signal sets it.
    """
    flag = StopFlag()

    def handle(number: int, _frame: FrameType | None) -> None:
        count = flag.set()
        if count == 1:
            # Not `print`: the signal may have come in the middle of one.
            os.write(2, f"{signal.Signals(number).name}: stopping after the batches in work\n".encode())
        elif count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(1)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
