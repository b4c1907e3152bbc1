"""Makes the next batches in a thread, while the current batch is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import TypeVar

Batch = TypeVar("Batch")
DEPTH = 2


@contextmanager
def prefetched(make: Callable[[int], Batch], numbers: range) -> Generator[Generator[Batch, None, None], None, None]:
    """Return a context manager that yields an iterator over ``make(number)`` for each number in `numbers`.

    A thread makes up to `DEPTH` batches ahead. The thread ends when the context is left.
    """
    ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(DEPTH)
    stop = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for number in numbers:
                if stop.is_set():
                    return
                put((make(number), None))
        except BaseException as error:  # raised again by the thread that waits for the batch
            put((None, error))

    def batches() -> Generator[Batch, None, None]:
        for _ in numbers:
            batch, error = ready.get()
            if error is not None:
                raise error
            yield batch  # type: ignore[misc]

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        with closing(batches()) as batch_iterator:
            yield batch_iterator
    finally:
        stop.set()
        thread.join()
