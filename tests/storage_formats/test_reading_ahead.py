"""Fetching batches in advance, for `for` and `async for` loops."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from storage_formats import TokenStore, UsageError
from tests.conftest import same_bits


class TestAhead:
    BATCHES = ([0, 5, 5], [], np.arange(299, 0, -7), [1])

    def test_iter_fetch_returns_each_batch_in_order(self, built):
        store = TokenStore.open(built[0])
        for ahead in (1, 2, 10):
            found = list(store.iter_fetch(iter(self.BATCHES), ahead=ahead))
            assert len(found) == 4
            for ids, blocks in zip(self.BATCHES, found, strict=True):
                assert same_bits(blocks, built[1][np.asarray(ids, dtype=int)])

    def test_it_reads_at_most_ahead_batches_in_advance(self, built):
        taken = []
        batches = (taken.append(number) or [number] for number in range(100))
        results = TokenStore.open(built[0]).iter_fetch(batches, ahead=2)
        next(results)
        assert len(taken) == 3
        results.close()
        assert len(taken) == 3

    @pytest.mark.parametrize("fault", ["break", "bad ids", "bad iterator"])
    def test_it_ends_its_thread_whatever_happens(self, built, fault):
        def batches():
            yield [1]
            if fault == "bad iterator":
                raise ZeroDivisionError
            yield [10**9] if fault == "bad ids" else [2]
            yield from ([number] for number in range(50))

        results = TokenStore.open(built[0]).iter_fetch(batches())
        expected = {"bad ids": UsageError, "bad iterator": ZeroDivisionError}
        if fault == "break":
            for _ in results:
                break
            results.close()
        else:
            with pytest.raises(expected[fault]):
                list(results)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("edje-fetch")]

    def test_ahead_below_one_is_refused(self, built):
        with pytest.raises(UsageError, match="ahead must be at least 1"):
            next(TokenStore.open(built[0]).iter_fetch([[1]], ahead=0))

    def test_async_iteration(self, built):
        async def collect(stop_after=None):
            ticks = 0
            found = []
            generator = TokenStore.open(built[0]).aiter_fetch(self.BATCHES, ahead=2)
            async for blocks in generator:
                found.append(blocks)
                ticks += 1
                if ticks == stop_after:
                    break
            await generator.aclose()
            return found

        for ids, blocks in zip(self.BATCHES, asyncio.run(collect()), strict=True):
            assert same_bits(blocks, built[1][np.asarray(ids, dtype=int)])
        assert len(asyncio.run(collect(stop_after=1))) == 1
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("edje-fetch")]
