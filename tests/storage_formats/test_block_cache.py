"""Blocks of an object store that are cached on the local disk equal the blocks of a
local index, whatever happens.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines import copy_index
from storage_formats import IndexSpec, TokenStore, UsageError
from storage_formats.reading import block_cache
from storage_formats.reading.block_cache import BlockCache, cache_bytes
from tests.command_line import environment
from tests.conftest import same_bits, write_random_index
from tests.object_store import use_endpoint
from tests.storage_formats.reading_cases import SPEC, flip

URL = "s3://bucket/photos.edje"
LARGER = "s3://bucket/larger.edje"
LESS = "600000"
TOKENS = "tokens/bf16/c."
# they start a server
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def stored(server, built):
    with pytest.MonkeyPatch.context() as patch:
        use_endpoint(patch, server)
        copy_index(built[0], URL)
    return built[0]


@pytest.fixture
def proxy(stored, proxy, monkeypatch, tmp_path):
    """An empty cache, and a proxy that counts the requests."""
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EDJE_CACHE_BYTES", raising=False)
    return proxy


def larger_index(tmp_path):
    """Copy an index of 20 shards of 64 KiB to `LARGER`. Return its blocks. About
    nine shards fit in `LESS` bytes.
    """
    blocks = write_random_index(tmp_path / "larger", IndexSpec(80, 4, (64, 128), 4))
    copy_index(tmp_path / "larger", LARGER, replace=True)
    return blocks


def cached_paths(tmp_path):
    return sorted(
        path for path in (tmp_path / "cache/blocks").rglob("*") if path.is_file()
    )


@slow
@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("limit", ["0", "1000000"])
def test_random_fetches_equal_local_ones_and_read_each_block_once(
    proxy, stored, whole, precision, limit, monkeypatch
):
    monkeypatch.setenv("EDJE_CACHE_BYTES", limit)
    rng = np.random.default_rng(5)
    expected = whole[precision]
    part = f"tokens/{precision}/c."
    with TokenStore.open(stored, precision) as local:
        records = local.fetch_records(range(SPEC.rows))
    for _ in range(5):
        row_ids = rng.integers(0, SPEC.rows, rng.integers(1, 60))
        with TokenStore.open(URL, precision) as store:
            assert same_bits(store.fetch(row_ids), expected[row_ids])
            before = proxy.count("GET", part)
            assert same_bits(store.fetch(row_ids[::-1]), expected[row_ids[::-1]])
            assert (store.fetch_records(row_ids) == records[row_ids]).all()
            assert same_bits(next(store.iter_fetch([row_ids])), expected[row_ids])
        with TokenStore.open(URL, precision) as another:
            assert same_bits(another.fetch(row_ids), expected[row_ids])
        assert (proxy.count("GET", part) == before) == (limit != "0")


@slow
@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "zeros", "directory", "unreadable"]
)
def test_a_damaged_cache_is_read_around_and_heals(proxy, whole, tmp_path, damage):
    row_ids = np.arange(60, 130)
    requests = []
    with TokenStore.open(URL) as store:
        store.fetch(row_ids)
        for path in cached_paths(tmp_path):
            size = path.stat().st_size
            if damage == "flip":
                flip(path, size // 2)
            elif damage == "truncate":
                os.truncate(path, size // 2 + 3)
            elif damage == "zeros":
                path.write_bytes(bytes(size))
            elif damage == "directory":
                path.unlink()
                path.mkdir()
            else:
                path.unlink()
                path.symlink_to("/proc/self/mem")
        for _ in range(3):
            requests.append(proxy.count("GET", TOKENS))
            assert same_bits(store.fetch(row_ids), whole["bf16"][row_ids])
    assert 0 < requests[1] - requests[0] <= 3
    heals = damage in ("flip", "truncate", "zeros")
    assert (requests[2] == requests[1]) == heals


@slow
def test_a_block_of_zeros_is_never_taken_from_a_hole(proxy, stored, tmp_path, server):
    """The file has a hole before the cached record, and the block in it consists of
    zeros.
    """
    spec = IndexSpec(8, 8, (64, 32), 4)
    blocks = write_random_index(tmp_path / "zeros", spec, zeros=frozenset({0}))
    url = "s3://bucket/zeros.edje"
    copy_index(tmp_path / "zeros", url)
    with TokenStore.open(url) as store:
        store.fetch([7])
        before = proxy.count("GET", TOKENS)
        assert same_bits(store.fetch([0]), blocks[:1])
        assert proxy.count("GET", TOKENS) == before + 1


@slow
def test_a_full_disk_and_lost_rights_are_no_errors(proxy, whole, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    row_ids = np.arange(0, SPEC.rows, 7)

    def fetch_twice():
        # the threads of a store write until it is closed
        with TokenStore.open(URL) as store:
            for _ in range(2):
                assert same_bits(store.fetch(row_ids), whole["bf16"][row_ids])

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        fetch_twice()
    monkeypatch.setattr(block_cache, "_FREE_BYTES", 1 << 60)
    fetch_twice()
    assert sum(path.stat().st_size for path in cached_paths(tmp_path)) == 0
    shutil.rmtree(tmp_path / "cache/blocks")
    (tmp_path / "cache/blocks").write_text("not a directory")
    fetch_twice()


_READER = """
import sys, numpy as np
from storage_formats import TokenStore
expected = np.load(sys.argv[1], mmap_mode="r")
rng = np.random.default_rng(int(sys.argv[2]))
with TokenStore.open("s3://bucket/larger.edje") as store:
    print("ready", flush=True)
    for _ in range(int(sys.argv[3])):
        row_ids = rng.integers(0, len(expected), 7)
        assert (store.fetch(row_ids).view(np.uint16) == expected[row_ids]).all()
"""


@slow
def test_processes_share_a_tiny_cache_and_killed_writers_do_no_harm(
    proxy, tmp_path, monkeypatch
):
    blocks = larger_index(tmp_path)
    np.save(tmp_path / "expected.npy", blocks.view(np.uint16))
    monkeypatch.setenv("EDJE_CACHE_BYTES", LESS)

    def start(seed, fetches):
        arguments = (str(tmp_path / "expected.npy"), str(seed), str(fetches))
        return subprocess.Popen(
            [sys.executable, "-c", _READER, *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    readers = [start(seed, 60) for seed in (1, 2)]
    killed = [start(seed, 1 << 30) for seed in (3, 4)]
    for number, process in enumerate(killed):
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1 + 0.1 * number)
        process.kill()
        process.communicate()
    for process in readers:
        _, error = process.communicate(timeout=120)
        assert (process.returncode, error) == (0, "")
    used = sum(path.stat().st_blocks * 512 for path in cached_paths(tmp_path))
    assert 0 < used <= int(LESS)
    with TokenStore.open(LARGER) as store:
        assert same_bits(store.fetch(range(len(blocks))), blocks)


def test_the_files_used_last_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    cache = BlockCache(URL, SimpleNamespace(record_bytes=50_000), 1 << 20)
    data = memoryview(os.urandom(50_000))
    for shard in range(16):
        cache.write(shard, 0, data)
    # the file that was written first was used last
    for path in cached_paths(tmp_path):
        if path.name != "0":
            os.utime(path, (time.time() - 1000 + int(path.name),) * 2)
    for shard in range(16, 26):
        cache.write(shard, 0, data)
    paths = cached_paths(tmp_path)
    left = {path.name for path in paths}
    assert {"0", "24", "25"} <= left
    assert not {"1", "2", "3", "4"} & left
    assert sum(path.stat().st_blocks * 512 for path in paths) <= 1 << 20
    cache.write(30, 0, memoryview(bytes(100_000)))
    assert cached_paths(tmp_path) == paths


@pytest.mark.parametrize("value", ["10 GB", "-1", "", "1e9", "9" * 5000])
def test_a_limit_that_is_no_number_of_bytes_is_refused(monkeypatch, value):
    monkeypatch.setenv("EDJE_CACHE_BYTES", value)
    with pytest.raises(
        UsageError, match="EDJE_CACHE_BYTES must be a number of bytes, not '"
    ):
        cache_bytes()
