"""A program whose fetches are interrupted by a signal handler that raises, for
test_interrupts.py.

    python -m tests.storage_formats.interrupted_fetches INDEX PRECISION ENGINE COUNT
    SHOTS

Prints the number of interrupted fetches.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from types import FrameType

import numpy as np

from storage_formats import TokenStore

SENTINEL = 0xA5A5


class Interruption(BaseException):
    """What the signal handler raises."""


class Alarm:
    """Raises `Interruption` in `TokenStore.fetch` after a random delay, `shots` times
    at most.

    It raises nowhere else: the program itself must not be interrupted while it sets or
    stops the timer.
    """

    def __init__(self, shots: int) -> None:
        self._shots = shots
        self._left = 0
        self._is_ringing = False
        self._random = random.Random(0)
        signal.signal(signal.SIGALRM, self._ring)

    def set(self, longest: float) -> None:
        self._left = self._shots
        signal.setitimer(
            signal.ITIMER_REAL, max(1e-6, self._random.uniform(0, longest)), 5e-5
        )

    def stop(self) -> None:
        self._left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, _signal: int, frame: FrameType | None) -> None:
        # On a busy machine, the next signal may arrive before this method returns.
        if self._is_ringing:
            return
        self._is_ringing = True
        is_hit = self._left > 0 and _in_fetch(frame)
        self._is_ringing = False
        if is_hit:
            self._left -= 1
            raise Interruption


def _in_fetch(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not TokenStore.fetch.__code__:
        frame = frame.f_back
    return frame is not None


def was_interrupted(
    alarm: Alarm,
    store: TokenStore,
    row_ids: np.ndarray,
    out: np.ndarray,
    longest: float,
) -> bool:
    alarm.set(longest)
    try:
        store.fetch(row_ids, out=out)
    except Interruption:
        return True
    finally:
        alarm.stop()
    return False


def main() -> None:
    root, precision, engine = sys.argv[1:4]
    count, shots = map(int, sys.argv[4:])
    store = TokenStore.open(root, precision, engine)
    every = range(len(store))
    with TokenStore.open(root, precision, "portable") as simple:
        expected = simple.fetch(every).view(np.uint16)
    rng = np.random.default_rng(0)
    out = store.empty(len(store))
    store.fetch(every, out=out)
    started = time.perf_counter()
    store.fetch(every, out=out)
    seconds = time.perf_counter() - started
    alarm = Alarm(shots)
    interrupted = 0
    for attempt in range(50 * count):
        first = rng.permutation(len(store))
        second = rng.permutation(len(store))
        if was_interrupted(alarm, store, first, out, longest=1.2 * seconds):
            interrupted += 1
            # exceptions in close succession may leave early; see `interrupts`
            if shots == 1 and attempt % 4 == 0:
                out.view(np.uint16)[:] = SENTINEL
                time.sleep(seconds)
                assert (out.view(np.uint16) == SENTINEL).all(), (
                    f"attempt {attempt}: written after the exception"
                )
        store.fetch(second, out=out)
        assert (out.view(np.uint16) == expected[second]).all(), (
            f"attempt {attempt}: wrong blocks"
        )
        if interrupted == count:
            break
    print(interrupted)


if __name__ == "__main__":
    main()
