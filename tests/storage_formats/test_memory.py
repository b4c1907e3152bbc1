"""Arrays that fetches return take the memory of earlier ones that no longer exist."""

from __future__ import annotations

import gc
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from storage_formats.reading import memory
from storage_formats.reading.memory import _KEPT_BYTES, _LARGEST_LENT, lend

SIZE = 3 << 20


def address(array):
    return array.ctypes.data


VIEWS = {
    "itself": lambda array: array,
    "view": lambda array: array[8:].view(np.int16).reshape(-1, 2)[::3],
    "tensor": lambda array: torch.from_numpy(array.view(np.int16))[5:].view(-1),
}


@pytest.mark.parametrize("derive", VIEWS.values(), ids=VIEWS)
def test_memory_is_lent_again_only_after_its_last_view(derive):
    first = lend(SIZE)
    first[:] = 7
    where = address(first)
    kept = derive(first)
    expected = kept[:9].tolist()
    del first
    gc.collect()
    second = lend(SIZE)
    second[:] = 9
    assert address(second) != where
    assert kept[:9].tolist() == expected
    del kept
    gc.collect()
    assert address(lend(SIZE)) == where


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
def test_lent_memory_is_aligned_writable_and_as_long_as_asked(size):
    array = lend(size)
    assert (array.shape, array.dtype) == ((size,), np.uint8)
    assert array.flags.writeable
    assert address(array) % 4096 == 0


def kept_bytes():
    return sum(length for length, _ in memory._pool)


def test_the_pool_keeps_little_memory():
    arrays = [lend(_LARGEST_LENT) for _ in range(6)]
    assert len({address(array) for array in arrays}) == 6
    assert kept_bytes() == _KEPT_BYTES
    del arrays
    where = address(lend(SIZE))
    assert kept_bytes() <= _KEPT_BYTES
    # large results do not keep the pool from using the memory of small ones again
    assert address(lend(SIZE)) == where
    # larger arrays are freed at once
    before = kept_bytes()
    lend(_LARGEST_LENT + 1)
    assert kept_bytes() == before


def test_threads_never_share_memory():
    def fill(number):
        array = lend(100_000)
        array[:] = number % 256
        return bool((array == number % 256).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(2400)))


def test_a_signal_is_heard_while_the_last_use_of_lent_memory_ends():
    def use_memory():
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        for _ in range(100):
            lend(_LARGEST_LENT).astype(np.float64)

    earlier = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                use_memory()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
