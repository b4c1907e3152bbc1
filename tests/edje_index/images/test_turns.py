"""Threads read a stream in the order of their positions, whatever interrupts one of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from edje_index.images.containers.streams import Turns

SECONDS = 30  # longest time that a test waits


def wait_until(is_true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(SECONDS * 1000):
        if is_true():
            return
        pause.wait(0.001)
    raise AssertionError("a thread does not wait for its turn")


def test_the_lowest_position_goes_first() -> None:
    turns, order = Turns(), []

    def take(position: int) -> None:
        with turns.at(position):
            order.append(position)

    with ThreadPoolExecutor(6) as pool, turns.at(9):
        for count, position in enumerate([5, 3, 8, 3, 1], 1):
            pool.submit(take, position)
            wait_until(lambda count=count: len(turns._waiting) == count)
    assert order == [1, 3, 3, 5, 8]


class Interrupt(BaseException):
    """What a signal raises in the main thread."""


def test_a_thread_that_is_interrupted_while_it_waits_holds_up_nobody() -> None:
    turns, holds, released = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.at(0):
            holds.set()
            assert released.wait(SECONDS)

    def interrupt_main_thread() -> None:
        wait_until(lambda: len(turns._waiting) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def interrupted(*_: object) -> None:
        raise Interrupt

    def take() -> bool:
        with turns.at(2):
            return True

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        with ThreadPoolExecutor(3) as pool:
            pool.submit(hold)
            assert holds.wait(SECONDS)
            pool.submit(interrupt_main_thread)
            with pytest.raises(Interrupt), turns.at(1):
                raise AssertionError("the turn is taken")
            other = pool.submit(take)
            wait_until(lambda: len(turns._waiting) == 1)
            released.set()
            assert other.result(SECONDS)
    finally:
        released.set()
        signal.signal(signal.SIGUSR1, before)


def test_an_error_during_a_turn_ends_it() -> None:
    turns = Turns()
    with pytest.raises(OSError, match="disk"), turns.at(1):
        raise OSError("disk")
    with turns.at(0):
        pass
