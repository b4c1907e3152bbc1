"""Random access to streams that can only be read forward: compressed tars and columns of Parquet files."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from edje_index.images.decode import ImageError

KEPT_BYTES = 16 << 20
"""Bytes that stay in memory after reading, because threads read slightly out of order."""

NEAR = 64
"""A position that is at most this far ahead is read by reading on, even if the stream can begin nearer."""

_END = object()


class StreamWindow:
    """The latest items of a stream. Thread-safe.

    Threads that wait read in the order of their positions. Reading backwards by more than `KEPT_BYTES`, reading far
    ahead, and reading after an error of the operating system begin the stream again.

    Args:
        starts: the positions at which the stream can begin, ascending from 0.
        begin: function that returns an iterator over the items from `starts[n]` on, given n. It raises ImageError at
            damage.
        width: function that returns the number of positions that an item takes.
    """

    def __init__(
        self,
        starts: Sequence[int],
        begin: Callable[[int], Iterator[bytes | None]],
        width: Callable[[bytes | None], int],
    ) -> None:
        self._starts = starts
        self._begin = begin
        self._width = width
        self._turns = Turns()
        self._damages: dict[int, tuple[int, ImageError]] = {}  # by part: the first position that cannot be read
        self._restart(0)

    def read(self, first: int, stop: int) -> list[tuple[int, bytes | None]]:
        """Return (position, item) of the items that overlap with [first, stop), up to the end of the stream.

        Raises:
            ImageError: the stream is damaged.
            OSError: the stream cannot be read.
        """
        part = bisect.bisect_right(self._starts, first) - 1
        start = self._starts[part]
        with self._turns.at(first):
            if part in self._damages and stop > self._damages[part][0]:
                raise self._damages[part][1]
            is_far_ahead = first > self._end + NEAR and start > self._end
            if self._is_broken or first < self._first or is_far_ahead:
                self._restart(part)
            while self._end < stop and not self._is_ended:
                try:
                    self._read_next(first)
                except ImageError as damage:
                    if self._end >= start:
                        self._damages[part] = self._end, damage
                        raise
                    self._restart(part)  # the damage is in an earlier part
            position, result = self._end, []
            for item in reversed(self._kept):  # most reads are near the end
                position -= self._width(item)
                if position < stop:
                    result.append((position, item))
                if position <= first:
                    break
            return result[::-1]

    def _restart(self, part: int) -> None:
        self._items = self._begin(part)
        self._kept: deque[bytes | None] = deque()
        self._kept_bytes = 0
        self._first = self._end = self._starts[part]
        self._is_ended = self._is_broken = False

    def _read_next(self, needed_from: int) -> None:
        """Read the next item. Drop the oldest items before `needed_from`, but keep the last `KEPT_BYTES` bytes."""
        self._is_broken = True  # until the item has arrived: an iterator ends at its first exception
        item = next(self._items, _END)
        self._is_broken = False
        if item is _END:
            self._is_ended = True
            return
        assert item is None or isinstance(item, bytes)
        self._kept.append(item)
        self._kept_bytes += len(item or b"")
        self._end += self._width(item)
        while self._kept_bytes > KEPT_BYTES and self._first + self._width(self._kept[0]) <= needed_from:
            oldest = self._kept.popleft()
            self._first += self._width(oldest)
            self._kept_bytes -= len(oldest or b"")


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
