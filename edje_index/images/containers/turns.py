"""A lock for threads that read one stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that the waiting thread with the lowest position gets first, so that a stream is read forward."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._holder: tuple[int, int] | None = None
        self._count = 0

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        """Context in which the caller holds the lock. A thread that is interrupted while it waits delays no other."""
        ticket: tuple[int, int] | None = None
        try:
            with self._changed:
                self._count += 1
                ticket = (position, self._count)
                self._waiting.append(ticket)
                self._changed.wait_for(lambda: self._holder is None and ticket == min(self._waiting))
                self._holder = ticket
                self._waiting.remove(ticket)
            yield
        finally:
            with self._changed:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                if self._holder == ticket:
                    self._holder = None
                self._changed.notify_all()
