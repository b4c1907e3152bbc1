"""Stopping a job early, by a callback, an exception or a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from pipelines.progress.events import Event, OnEvent
from storage_formats.errors import EdjeError

ShouldStop = Callable[[], bool]
"""Function that a job calls often. Once the function returns True, the job stops at the next safe point.

A build may call the function from two threads."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobStopped(EdjeError):
    """The job stopped early, on request or because of an error. Finished work is kept.

    Example:
        >>> from pipelines import JobStopped, build_index
        >>> try:
        ...     build_index("photos", "new.edje", "model", engine="inline", should_stop=lambda: True)
        ... except JobStopped:
        ...     print("stopped")
        stopped
    """


def is_stop_request(error: BaseException) -> bool:
    """Return True if a job ended with `error` because its stop was requested, and not because of another error."""
    if isinstance(error, JobStopped):
        return error.__cause__ is None or is_stop_request(error.__cause__)
    return isinstance(error, KeyboardInterrupt)


def stop_at_events(on_event: OnEvent, should_stop: ShouldStop, message: str) -> OnEvent:
    """Return a callback that passes each event to `on_event`, for a job that can stop at each of its events.

    Once `should_stop()` returns True, the callback raises JobStopped with `message`.
    """

    def report(event: Event) -> None:
        on_event(event)
        if should_stop():
            raise JobStopped(message)

    return report


class StopFlag:
    """A `ShouldStop` callback that returns True after a call of `set`."""

    def __init__(self) -> None:
        self._requests = 0

    def __call__(self) -> bool:
        return self._requests > 0

    def set(self) -> int:
        """Request a stop. Return the number of requests so far."""
        self._requests += 1
        return self._requests


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Yield a flag that the signals SIGINT, SIGTERM and SIGHUP set.

    The second signal raises KeyboardInterrupt. The third signal ends the process at once.
    """
    # Signals that were ignored before (by nohup, for example) stay ignored.
    flag = StopFlag()

    def handle(number: int, _frame: FrameType | None) -> None:
        requests = flag.set()
        if requests == 1:
            # os.write instead of print: the signal may have interrupted a print.
            os.write(2, f"{signal.Signals(number).name}: stopping after the current batches\n".encode())
        elif requests == 2:
            raise KeyboardInterrupt
        else:
            os._exit(1)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
