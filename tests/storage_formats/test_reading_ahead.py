"""Fetching batches in advance."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from storage_formats import TokenStore, UsageError
from tests.conftest import same_bits

BATCHES = ([0, 5, 5], [], np.arange(299, 0, -7), [1])


def threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("edje-ahead")
    ]


@pytest.mark.parametrize("ahead", [1, 10])
def test_batches_come_in_order(built, ahead):
    store = TokenStore.open(built[0])
    for ids, blocks in zip(
        BATCHES, store.iter_fetch(iter(BATCHES), ahead=ahead), strict=True
    ):
        assert same_bits(blocks, built[1][np.asarray(ids, dtype=int)])
    assert not threads()


def test_it_reads_at_most_ahead_batches_in_advance(built):
    taken = []
    batches = (taken.append(number) or [number] for number in range(100))
    results = TokenStore.open(built[0]).iter_fetch(batches, ahead=2)
    next(results)
    assert len(taken) == 3
    results.close()
    assert len(taken) == 3
    assert not threads()
    with pytest.raises(UsageError, match="ahead must be an integer of at least 1"):
        next(TokenStore.open(built[0]).iter_fetch([[1]], ahead=0))


@pytest.mark.parametrize(
    ("row_id", "error"),
    [(lambda: 10**9, UsageError), (lambda: 1 // 0, ZeroDivisionError)],
)
def test_it_ends_its_thread_after_an_error(built, row_id, error):
    batches = ([row_id()] for _ in range(50))
    with pytest.raises(error):
        list(TokenStore.open(built[0]).iter_fetch(batches))
    assert not threads()
