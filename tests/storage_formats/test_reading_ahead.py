"""Fetching batches in advance."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from storage_formats import TokenStore, UsageError
from tests.conftest import same_bits

BATCHES = ([0, 5, 5], [], np.arange(299, 0, -7), [1])


@pytest.mark.parametrize("ahead", [1, 2, 10])
def test_each_batch_is_returned_in_order(built, ahead):
    fetched = list(TokenStore.open(built[0]).iter_fetch(iter(BATCHES), ahead=ahead))
    for ids, blocks in zip(BATCHES, fetched, strict=True):
        assert same_bits(blocks, built[1][np.asarray(ids, dtype=int)])


def test_at_most_ahead_batches_are_read_in_advance(built):
    taken = []
    batches = (taken.append(number) or [number] for number in range(100))
    results = TokenStore.open(built[0]).iter_fetch(batches, ahead=2)
    next(results)
    assert len(taken) == 3
    results.close()
    assert len(taken) == 3
    with pytest.raises(UsageError, match="ahead must be at least 1"):
        next(TokenStore.open(built[0]).iter_fetch([[1]], ahead=0))


@pytest.mark.parametrize("error", [None, UsageError, ZeroDivisionError])
def test_the_thread_ends_whatever_happens(built, error):
    def batches():
        yield [1]
        if error is ZeroDivisionError:
            raise ZeroDivisionError
        yield [10**9] if error else [2]
        yield from ([number] for number in range(50))

    results = TokenStore.open(built[0]).iter_fetch(batches())
    if error is None:
        next(results)
        results.close()
    else:
        with pytest.raises(error):
            list(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edje-fetch")]
