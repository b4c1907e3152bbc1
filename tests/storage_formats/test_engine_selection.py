"""Selection of a read engine by name and by the state of the page cache (`auto`)."""

from __future__ import annotations

import errno
import os
import sys
import time

import numpy as np
import pytest

from storage_formats import TokenStore, UsageError
from storage_formats.format.layout import Layout
from storage_formats.reading import engines
from storage_formats.reading.aio import AioQueue
from storage_formats.reading.base import Batch
from storage_formats.reading.files import ShardFiles
from storage_formats.reading.page_cache import cache_room, resident_records, resident_share
from storage_formats.reading.ring import Ring
from tests.conftest import same_bits
from tests.storage_formats.reading_cases import ALL, SPEC, evict, linux


def test_unknown_engines_are_refused(built):
    with pytest.raises(UsageError, match=r"engine 'floppy' .*; choose one of: auto, .*portable"):
        TokenStore.open(built[0], engine="floppy")


def test_engines_that_do_not_work_are_refused_by_name_and_not_used_by_auto(built, monkeypatch):
    for name in ("io_uring_works", "aio_works"):
        monkeypatch.setattr(f"storage_formats.reading.engine_selection.{name}", lambda: False)
    monkeypatch.setattr("storage_formats.reading.engine_selection.engines", engines.__wrapped__)
    assert not {"io_uring", "direct", "sequential"} & set(engines.__wrapped__())
    with pytest.raises(UsageError, match="does not work on this machine"):
        TokenStore.open(built[0], engine="io_uring")
    assert same_bits(TokenStore.open(built[0]).fetch(range(SPEC.rows)), built[1])


@linux
def test_file_systems_without_direct_io_are_read_through_the_cache(built, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    for engine in ALL:
        store = TokenStore.open(built[0], engine=engine)
        for _ in range(2):
            evict(built[0])
            assert same_bits(store.fetch(range(SPEC.rows)), built[1])


def wait_until_cached(files, batch, positions):
    """Wait until the kernel has read the records, which `prefetch` only starts."""
    (file,) = files.acquire(batch).values()
    deadline = time.monotonic() + 60
    while not resident_records(file, files.record_bytes)[positions].all() and time.monotonic() < deadline:
        time.sleep(0.01)


class TestAuto:
    """`auto` selects by the state of the page cache."""

    @staticmethod
    def names(store, row_ids):
        """Number of rows that each engine would read. Nothing is read."""
        counts = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "storage_formats.token_store.read_batch",
                lambda engine, part, _: counts.update({engine.name: len(part)}),
            )
            store.fetch(row_ids)
        return counts

    @pytest.fixture
    def store(self, built):
        if sys.platform != "linux" or not {"io_uring", "direct"} & set(engines()):
            pytest.skip("no direct reads here")
        evict(built[0])
        with TokenStore.open(built[0]) as store:
            yield store

    def test_cold_rows_bypass_the_page_cache_and_cached_rows_are_copied(self, built, store, monkeypatch):
        monkeypatch.setattr("storage_formats.reading.engine_selection._RESIDENCY_TRUSTED_SECONDS", 1000)
        cold = {"io_uring", "direct"}
        assert set(self.names(store, range(1, 64, 2))) < cold
        assert set(self.names(store, [1, 70, 130])) < cold
        path = Layout(built[0]).token_shard("bf16", 0)
        path.read_bytes()
        assert self.names(store, range(1, 64, 2)) == {"mapped": 32}
        found = self.names(store, range(1, 128, 2))
        assert found.pop("mapped") == 32
        assert set(found) < cold
        assert self.names(store, [1, 9]) == {"mapped": 2}, "the whole shard was looked up above"
        with TokenStore.open(built[0]) as fresh:
            assert self.names(fresh, [1, 9]) == {"buffered": 2}

    def test_direct_reads_do_not_fill_the_page_cache(self, built, store):
        store.fetch(range(SPEC.rows))
        files = ShardFiles(lambda shard: Layout(built[0]).token_shard("bf16", shard), 512)
        batch = Batch(*(np.array([0]) for _ in range(3)))
        (file,) = files.acquire(batch).values()
        assert resident_share(file, 0, 60 * 512) == 0
        assert not resident_records(file, 512).any()
        file.path.read_bytes()
        assert resident_share(file, 0, 60 * 512) == 1
        assert resident_records(file, 512).all()
        assert resident_share(file, 100, 5000) == 1

    def test_a_whole_shard_in_any_order_is_read_in_large_requests(self, built, store, monkeypatch):
        ids = np.random.default_rng(0).permutation(64)
        assert self.names(store, ids) == {"sequential": 64}
        assert "sequential" not in self.names(store, range(64))
        asked = []
        for kind in (Ring, AioQueue):
            real = kind.put

            def put(self, fds, offsets, addresses, lengths, tags, real=real):
                asked.extend(lengths.tolist())
                return real(self, fds, offsets, addresses, lengths, tags)

            monkeypatch.setattr(kind, "put", put)
        with TokenStore.open(
            built[0]
        ) as fresh:  # the other store has counted so many reads that it would use the page cache
            assert same_bits(fresh.fetch(ids), built[1][ids])
        assert asked == [64 * 512]

    def test_rows_that_are_read_repeatedly_enter_the_page_cache(self, built, store, monkeypatch):
        if cache_room() < 1 << 20:
            pytest.skip("no memory to keep it in")
        seen = []
        for _ in range(5):
            seen.append(set(self.names(store, range(0, 64, 2))))
            store.fetch(range(0, 64, 2))
        assert {"buffered"} in seen
        assert seen[-1] == {"mapped"}
        store.close()  # mapped pages cannot be evicted
        evict(built[0])
        monkeypatch.setattr("storage_formats.reading.admission._SETTLED_SECONDS", 0)
        assert not {"mapped", "buffered"} & set(self.names(store, range(0, 64, 2))), "the cache lost it: try later"

    def test_repeated_reads_use_the_page_cache_if_residency_is_unknown(self, store, monkeypatch):
        if cache_room() < 1 << 20:
            pytest.skip("no memory to keep it in")
        monkeypatch.setattr("storage_formats.reading.engine_selection.resident_share", lambda *_: None)
        monkeypatch.setattr("storage_formats.reading.admission._SETTLED_SECONDS", 0)
        seen = [set(self.names(store, range(0, 64, 2))) for _ in range(12)]
        assert "buffered" not in seen[0]
        assert seen[-5:] == [{"buffered"}] * 5

    def test_prefetched_rows_are_in_the_page_cache(self, built, store):
        store.prefetch(range(8, 40))
        files = ShardFiles(lambda shard: Layout(built[0]).token_shard("bf16", shard), 512)
        wait_until_cached(files, Batch(*(np.array([0]) for _ in range(3))), range(8, 40))
        assert self.names(store, range(8, 40)) == {"mapped": 32}
        store.prefetch([])
        with pytest.raises(UsageError, match="row id -1 is out of range"):
            store.prefetch([-1])
