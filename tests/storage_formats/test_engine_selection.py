"""Selection of a read engine by name and by the state of the page cache (`auto`)."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.disk import resident
from storage_formats import TokenStore, UsageError
from storage_formats.atomic import fsync_path
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.reading import engines, files, local_reads
from storage_formats.reading.batch import Batch
from tests.conftest import same_bits, write_random_index
from tests.storage_formats.reading_cases import ALL, SPEC, evict, linux, without_queues


def test_engines_that_are_unknown_or_do_not_work_are_refused(built, monkeypatch):
    with pytest.raises(UsageError, match=r"'floppy' .*: auto, .*portable"):
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


@pytest.fixture
def built(built, disk):
    """A copy that no other test has mapped: mapped pages stay in the page cache."""
    root = Path(tempfile.mkdtemp(dir=disk))
    shutil.copytree(built[0], root, dirs_exist_ok=True)
    for path in Layout(root).token_array("bf16").glob("c.*"):
        fsync_path(path)
    return root, built[1]


def chosen(store, row_ids):
    """Number of rows that each engine would read. Nothing is read."""
    ids = np.asarray(row_ids)
    batch = Batch(*np.divmod(ids, SPEC.shard_size), np.arange(len(ids)))
    return {engine: len(part) for engine, part in store._view.reads.split(batch)}


@pytest.fixture(params=[False, True], ids=["cachestat", "mincore"])
def store(built, request, monkeypatch):
    if "direct" not in engines():
        pytest.skip("no direct reads here")
    if request.param:
        # a system call that the kernel does not know
        monkeypatch.setattr(files, "_CACHESTAT", 1 << 20)
    monkeypatch.setattr(local_reads, "_SEARCH_RECORDS", 31)
    monkeypatch.setattr(files, "TRUSTED_SECONDS", 0)
    evict(built[0])
    with TokenStore.open(built[0]) as opened:
        yield opened


def test_shards_in_the_page_cache_are_copied_and_others_bypass_it(
    built, store, monkeypatch
):
    monkeypatch.setattr(local_reads, "available_memory", lambda: 0)
    for _ in range(20):
        store.fetch(range(SPEC.rows))
        assert chosen(store, range(1, 128, 2)) == {"direct": 64}, (
            "direct reads do not fill the page cache"
        )
    Layout(built[0]).token_shard("bf16", 0).read_bytes()
    assert chosen(store, range(1, 128, 2)) == {"mapped": 32, "direct": 32}
    assert chosen(store, [1, 9]) == {"mapped": 2}


def test_candidates_of_a_search_are_read_into_the_page_cache_once(
    built, store, monkeypatch
):
    advised = []
    advise = os.posix_fadvise
    monkeypatch.setattr(
        os, "posix_fadvise", lambda *call: advised.append(call[2]) or advise(*call)
    )
    assert chosen(store, [3, 100]) == {"portable": 2}
    for rows, reads in (([0, 16, 32], 3), ([0, 16, 32], 0), ([0, 16, 48], 1)):
        assert same_bits(store.fetch(rows), built[1][rows])
        # a page that the kernel looked at when it was evicted is still there
        assert advised.count(built[1][0].nbytes) <= reads
        advised.clear()


def test_shards_that_leave_the_page_cache_are_trusted_no_longer(
    built, store, monkeypatch
):
    monkeypatch.setattr(files, "TRUSTED_SECONDS", 3600)
    for path in Layout(built[0]).token_array("bf16").glob("c.*"):
        path.read_bytes()
    for _ in range(2):
        assert same_bits(store.fetch([0, 40]), built[1][[0, 40]])
    for mapped in store._view.reads._mapped._maps.values():
        mapped.madvise(mmap.MADV_DONTNEED)
    evict(built[0])
    ids = np.array([0, 40])
    assert not store._view.reads.read_cached(ids, None)
    assert chosen(store, ids) == {"portable": 2}
    assert same_bits(store.fetch(ids), built[1][ids])


def test_a_search_of_more_shards_than_may_be_open_maps_no_file(built, monkeypatch):
    monkeypatch.setattr(local_reads, "open_files", lambda: SPEC.shards - 1)
    Layout(built[0]).token_shard("bf16", 0).read_bytes()
    with TokenStore.open(built[0]) as store:
        assert chosen(store, [1, 9]) == {"portable": 2}
        assert same_bits(store.fetch([1, 9, 100]), built[1][[1, 9, 100]])


def test_what_is_read_again_and_again_gets_into_the_page_cache(store, monkeypatch):
    for expected in ({"direct": 64}, {"portable": 64}, {"mapped": 64}):
        assert chosen(store, range(64)) == expected
        if "portable" in expected:
            store.fetch(range(64))
    # not if the memory has no room
    monkeypatch.setattr(local_reads, "available_memory", lambda: 2 * 64 * 512)
    for _ in range(5):
        assert chosen(store, range(64, 128)) == {"direct": 64}


def test_a_shard_is_loaded_as_a_whole_although_only_a_part_is_read(disk):
    if "direct" not in engines():
        pytest.skip("no direct reads here")
    # The shard has 40 MiB. For one advice, the kernel loads 128 KiB to 8 MiB.
    spec = IndexSpec(1024, 1024, (64, 320), 6)
    root = Path(tempfile.mkdtemp(dir=disk))
    blocks = write_random_index(root, spec)
    shard = Layout(root).token_shard("bf16", 0)
    fsync_path(shard)
    evict(root)
    with TokenStore.open(root) as store:
        for _ in range(3):
            assert same_bits(store.fetch(range(900)), blocks[:900])
        assert resident([shard]) > 0.99
    shutil.rmtree(root)


def test_one_pass_leaves_the_page_cache_as_it_is(built, store, monkeypatch):
    # There is room for one shard. The index has five.
    monkeypatch.setattr(local_reads, "available_memory", lambda: 2 * 64 * 512)
    for rows in np.array_split(np.random.default_rng(0).permutation(SPEC.rows), 5):
        assert same_bits(store.fetch(rows), built[1][rows])
    # A pass that adds no pages displaces none of another file. A page that the kernel
    # looked at when it was evicted is still there.
    assert resident(Layout(built[0]).token_array("bf16").glob("c.*")) < 0.1
