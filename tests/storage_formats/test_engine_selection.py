"""Selection of a read engine by name and by the state of the page cache (`auto`)."""

from __future__ import annotations

import errno
import os
import time

import numpy as np
import pytest

from storage_formats import TokenStore, UsageError
from storage_formats.format.layout import Layout
from storage_formats.reading import engines, files
from storage_formats.reading.batch import Batch
from storage_formats.reading.local_reads import cache_room
from tests.conftest import same_bits
from tests.storage_formats.reading_cases import ALL, SPEC, evict, linux, without_queues


def test_engines_that_are_unknown_or_do_not_work_are_refused(built, monkeypatch):
    with pytest.raises(UsageError, match=r"engine 'floppy' .*; choose one of: auto, .*portable"):
        TokenStore.open(built[0], engine="floppy")
    without_queues(monkeypatch)
    assert engines() == ("mapped", "portable")
    with pytest.raises(UsageError, match="does not work on this machine"):
        TokenStore.open(built[0], engine="direct")


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


def chosen(store, row_ids):
    """Number of rows that each engine would read. Nothing is read."""
    ids = np.asarray(row_ids)
    batch = Batch(*np.divmod(ids, SPEC.shard_size), np.arange(len(ids)))
    return {engine: len(part) for engine, part in store._view.reads.split(batch)}


@pytest.fixture(params=[False, True], ids=["cachestat", "mincore"])
def store(built, request, monkeypatch):
    if "direct" not in engines() or cache_room() < 1 << 20:
        pytest.skip("no direct reads here, or no memory for the page cache")
    if request.param:
        monkeypatch.setattr(files, "_CACHESTAT", 1 << 20)  # a system call that the kernel does not know
    evict(built[0])
    with TokenStore.open(built[0]) as opened:
        yield opened


def test_cold_shards_bypass_the_page_cache_and_cached_ones_are_copied(built, store, monkeypatch):
    monkeypatch.setattr(files, "_TRUSTED_SECONDS", 0)
    store.fetch(range(SPEC.rows))
    assert chosen(store, range(1, 128, 2)) == {"direct": 64}, "direct reads do not fill the page cache"
    Layout(built[0]).token_shard("bf16", 0).read_bytes()
    assert chosen(store, range(1, 128, 2)) == {"mapped": 32, "direct": 32}
    assert chosen(store, [1, 9]) == {"mapped": 2}


def test_shards_that_are_read_repeatedly_enter_the_page_cache(built, store):
    for _ in range(2 * 64 // 32 + 1):
        assert chosen(store, range(0, 64, 2)) == {"direct": 32}
    deadline = time.monotonic() + 60
    while chosen(store, [0]) != {"mapped": 1}:  # the kernel reads in the background
        assert time.monotonic() < deadline
        for file in store._view.reads._direct_files._open.values():
            file.trusted_until = 0
    assert same_bits(store.fetch(range(64)), built[1][:64])
    assert store._view.reads._direct_reads[0][1] == 4 * 64 * 512, "after an eviction, more reads are necessary"


def test_shards_that_do_not_fit_in_memory_never_enter_the_page_cache(built, store, monkeypatch):
    monkeypatch.setattr("storage_formats.reading.local_reads.cache_room", lambda: 10_000)
    for _ in range(20):
        assert chosen(store, range(0, 64, 2)) == {"direct": 32}
