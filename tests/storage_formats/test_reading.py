"""Every engine returns the same blocks and reports lost data."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import copy_index, delete_rows
from storage_formats import (
    CorruptIndexError,
    RowIdError,
    TokenStore,
    UsageError,
    codec,
    threads,
    verify_index,
)
from storage_formats.format.layout import Layout
from storage_formats.reading import direct, queues
from storage_formats.reading.batch import PIECE_RECORDS
from storage_formats.reading.files import ShardFiles
from storage_formats.reading.queues import Queue, borrow_queue
from tests.conftest import REPO, same_bits, write_random_index
from tests.storage_formats import reading_cases
from tests.storage_formats.reading_cases import (
    ALL,
    ODD,
    SPEC,
    evict,
    linux,
    needs_queues,
    without_queues,
)

PRECISIONS = SPEC.precisions


@linux
@pytest.mark.parametrize("has_queues", [True, False])
@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", PRECISIONS)
@given(ids=st.lists(st.integers(0, SPEC.rows - 1), max_size=200), cold=st.booleans())
@settings(max_examples=10)
def test_every_engine_equals_plain_slicing(
    built, whole, precision, engine, has_queues, ids, cold
):
    with pytest.MonkeyPatch.context() as patch:
        if not has_queues:
            without_queues(patch)
        if engine not in ("auto", *reading_cases.engines()):
            return
        if cold:
            evict(built[0], precision)
        expected = whole[precision][ids].reshape(-1, *SPEC.block_shape)
        with TokenStore.open(built[0], precision, engine) as store:
            assert same_bits(store.fetch(ids), expected)
            records = store.fetch_records(ids)
        decoded = codec(precision, SPEC.block_shape).decode(records)
        assert same_bits(decoded, expected)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", ODD.precisions)
def test_records_that_are_not_whole_sectors(odd, precision, engine):
    ids = np.random.default_rng(0).integers(0, ODD.rows, 200)
    entry = codec(precision, ODD.block_shape)
    expected = entry.decode(entry.encode(odd[1][ids]))
    assert same_bits(TokenStore.open(odd[0], precision, engine).fetch(ids), expected)


@needs_queues
def test_a_whole_shard_in_any_order_is_read_in_large_requests(built, monkeypatch):
    ids = np.random.default_rng(0).permutation(64)
    lengths_asked = []
    real = Queue.put

    def put(self, fds, offsets, addresses, lengths, tags):
        lengths_asked.extend(lengths.tolist())
        return real(self, fds, offsets, addresses, lengths, tags)

    monkeypatch.setattr(Queue, "put", put)
    assert same_bits(
        TokenStore.open(built[0], "bf16", "direct").fetch(ids), built[1][ids]
    )
    assert lengths_asked == [64 * 512]


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_any_output_memory_works(built, engine, offset):
    memory = np.zeros(SPEC.rows * 256 + 512, dtype=ml_dtypes.bfloat16)
    stop = offset + SPEC.rows * 256
    out = memory[offset:stop].reshape(SPEC.rows, 8, 32)
    ids = np.random.default_rng(1).permutation(SPEC.rows)
    assert TokenStore.open(built[0], engine=engine).fetch(ids, out=out) is out
    assert same_bits(out, built[1][ids])
    assert not memory[:offset].any()
    assert not memory[stop:].any()


def test_records_have_an_output_array_too(built):
    store = TokenStore.open(built[0], "fp8")
    records = store.fetch_records([5, 5, 299])
    out = np.empty_like(records)
    assert store.fetch_records([5, 5, 299], out=out) is out
    assert (out == records).all()
    with pytest.raises(UsageError, match=r"out must be a writeable .* uint8"):
        store.fetch_records([0], out=out)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("harm", ["missing", "short", "folder"])
def test_lost_bytes_are_an_error_with_every_engine(odd, tmp_path, engine, harm):
    shutil.copytree(odd[0], tmp_path, dirs_exist_ok=True)
    path = Layout(tmp_path).token_shard("bf16", 1)
    if harm == "short":
        os.truncate(path, 200)
    else:
        path.unlink()
    if harm == "folder":
        path.mkdir()
    store = TokenStore.open(tmp_path, engine=engine)
    with pytest.raises(CorruptIndexError) as raised:
        store.fetch([0, 55, 85])
    assert raised.value.remedy == "verify"
    assert store.fetch([0, 85]).shape == (2, 3, 7), "the store goes on"


_SHORTENED = """
import os, sys
from pathlib import Path
from storage_formats import CorruptIndexError, TokenStore
root, engine = sys.argv[1:]
with TokenStore.open(root, engine=engine) as store:
    store.fetch(range(64, 128))
    path = Path(root) / "tokens/bf16/c.1.0.0"
    os.truncate(path, 3 * path.stat().st_size // 5)
    try:
        store.fetch(range(64, 128))
    except CorruptIndexError as error:
        print(error, 'remedy:', error.remedy)
    print(store.fetch(range(64)).shape)
"""


@linux
@pytest.mark.parametrize(
    "engine",
    [
        "mapped",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ALL
            if name != "mapped"
        ),
    ],
)
def test_a_file_that_shrank_while_it_was_open_is_an_error(built, tmp_path, engine):
    """In a process of its own, which a read past the end of a map would kill. The
    sampled record is still there.
    """
    shutil.copytree(built[0], tmp_path, dirs_exist_ok=True)
    command = [sys.executable, "-c", _SHORTENED, str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert "remedy: verify" in done.stdout
    assert done.stdout.splitlines()[-1] == "(64, 8, 32)"


def test_queues_are_small_if_the_kernel_has_few_entries_left(monkeypatch):
    asked = []

    def make(entries):
        asked.append(entries)
        if entries > 200:
            raise OSError(errno.EAGAIN, "too many entries")
        return entries

    monkeypatch.setattr(queues, "Queue", make)
    monkeypatch.setattr(queues, "idle_queues", [])
    assert borrow_queue() == asked[-1] == PIECE_RECORDS


def open_paths():
    """Paths of the files that this process has open. Threads of other tests may
    open and close some meanwhile.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{name}")


@pytest.mark.parametrize("engine", ALL)
def test_few_files_are_open_and_none_after_close(many_shards, engine, monkeypatch):
    for module in ("files", "mapped"):
        monkeypatch.setattr(f"storage_formats.reading.{module}.open_files", lambda: 2)
    monkeypatch.setattr("storage_formats.reading.mapped.MAPPED_SHARDS", 2)
    held = []
    real = ShardFiles.acquire

    def acquire(self, shards):
        if "tokens" in self._name:
            held.append(len(shards))
        return real(self, shards)

    monkeypatch.setattr(ShardFiles, "acquire", acquire)
    root, expected = many_shards

    def open_shards():
        return [path for path in open_paths() if str(root) in path]

    store = TokenStore.open(root, engine=engine)
    for _ in range(2):
        assert same_bits(store.fetch(range(60)), expected)
    # cached and direct files
    assert len(open_shards()) <= 2 * 2
    if engine == "mapped":
        # of 15 shards
        assert max(held) == 2
    store.close()
    assert not open_shards()
    assert same_bits(store.fetch([59]), expected[[59]])
    del store
    gc.collect()
    assert not open_shards()


@needs_queues
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_sparse_pieces_after_dense_ones_do_not_overfill_the_queue(
    built, whole, monkeypatch, precision
):
    monkeypatch.setattr(queues, "ENTRIES", PIECE_RECORDS)
    monkeypatch.setattr(queues, "idle_queues", [])
    put = Queue.put

    def checked(self, fds, *rest):
        assert self.in_flight + len(fds) <= self.entries
        put(self, fds, *rest)

    monkeypatch.setattr(Queue, "put", checked)
    monkeypatch.setattr(direct, "_GAP_BYTES", 0)
    ids = [*range(60), *range(64, SPEC.rows, 2)]
    assert same_bits(
        TokenStore.open(built[0], precision, "direct").fetch(ids), whole[precision][ids]
    )


@linux
@pytest.mark.parametrize("engine", ALL)
def test_threads_share_a_store_that_another_thread_closes(built, whole, engine):
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, SPEC.rows, 100) for _ in range(40)]
    ended = threading.Event()
    with (
        TokenStore.open(built[0], "fp8", engine) as store,
        ThreadPoolExecutor(9) as pool,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(ended.set)
        pool.submit(lambda: [store.close() for _ in iter(ended.is_set, True)])
        results = pool.map(store.fetch, requests)
        for ids, blocks in zip(requests, results, strict=True):
            assert same_bits(blocks, whole["fp8"][ids])


def test_reads_served_in_part_are_continued(built, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, buffers, *rest: read(fd, [buffers[0][:100]], *rest),
    )
    assert same_bits(
        TokenStore.open(built[0], engine="portable").fetch(range(70)), built[1][:70]
    )


@needs_queues
@pytest.mark.parametrize("result", [-errno.EIO, 0, 100])
def test_requests_that_the_kernel_fails_are_read_again(
    built, whole, monkeypatch, result
):
    put = Queue.put
    wait = Queue.wait
    memory = {}

    def noting(self, fds, offsets, addresses, lengths, tags):
        for tag, address, length in zip(tags, addresses, lengths, strict=True):
            memory[int(tag)] = int(address), int(length)
        put(self, fds, offsets, addresses, lengths, tags)

    def failing(self, minimum):
        tags, results = wait(self, minimum)
        read = max(result, 0)
        for tag in tags[tags % 3 == 0].tolist():
            address, length = memory[tag]
            ctypes.memset(address + read, 0xAB, length - read)
        return tags, np.where(tags % 3 == 0, result, results)

    monkeypatch.setattr(Queue, "put", noting)
    monkeypatch.setattr(Queue, "wait", failing)
    # without and with gaps between the rows
    for precision, step in itertools.product(("bf16", "fp8"), (1, 2)):
        ids = range(0, SPEC.rows, step)
        blocks = TokenStore.open(built[0], precision, "direct").fetch(ids)
        assert same_bits(blocks, whole[precision][ids])


@needs_queues
def test_requests_that_the_kernel_refuses_are_read_again(built, monkeypatch):
    real = queues.system_call
    refused = []

    def refusing(number, *arguments):
        if number != queues._CALLS[platform.machine()][2]:
            return real(number, *arguments)
        context, count, pointers = arguments
        if count < 3:
            refused.append(count)
            raise OSError(errno.EAGAIN, "no more requests")
        # the kernel starts the first one only
        return real(number, context, 1, pointers)

    monkeypatch.setattr(queues, "system_call", refusing)
    ids = range(0, SPEC.rows, 2)
    monkeypatch.setattr(direct, "_GAP_BYTES", 0)
    with TokenStore.open(built[0], "bf16", "direct") as store:
        assert same_bits(store.fetch(ids), built[1][ids])
    assert refused


@needs_queues
def test_a_fetch_without_queues_reads_portably(built, monkeypatch):
    def refuse(entries):
        raise OSError(errno.EAGAIN, "fs.aio-max-nr is reached")

    monkeypatch.setattr(queues, "Queue", refuse)
    monkeypatch.setattr(queues, "idle_queues", [])
    blocks = TokenStore.open(built[0], engine="direct").fetch(range(SPEC.rows))
    assert same_bits(blocks, built[1])


@pytest.mark.parametrize("engine", ALL)
def test_a_fetch_without_helper_threads_works_in_the_calling_thread(
    built, whole, engine, monkeypatch
):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    monkeypatch.setattr("storage_formats.threads._threads", threads._HelperThreads())
    monkeypatch.setattr("storage_formats.threads._CHUNK_BYTES", 4096)
    monkeypatch.setattr("storage_formats.threads.default_threads", lambda: 4)
    blocks = TokenStore.open(built[0], "fp8", engine).fetch(range(SPEC.rows))
    assert same_bits(blocks, whole["fp8"])


def test_checks_and_changes_work_in_the_calling_thread(tmp_path, monkeypatch):
    root = tmp_path / "index"
    blocks = write_random_index(root, replace(SPEC, rows=40, shard_size=8))
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr("_thread.start_new_thread", refuse)
    monkeypatch.setattr("storage_formats.threads._threads", threads._HelperThreads())
    started = []
    start = threading.Thread.start

    def start_one(thread):
        started.append(thread)
        return start(thread) if len(started) == 1 else refuse()

    for first in (start_one, refuse):
        monkeypatch.setattr(threading.Thread, "start", first)
        assert verify_index(root) == []
    (batch,) = TokenStore.open(root).iter_fetch([[1, 39]])
    assert same_bits(batch, blocks[[1, 39]])
    with pytest.raises(RowIdError):
        next(TokenStore.open(root).iter_fetch([[40]]))
    assert copy_index(root, tmp_path / "whole").rows == 40
    assert copy_index(root, tmp_path / "some", rows=[3]).rows == 1
    assert delete_rows(root, [5], erase=True).erased == 1
    assert verify_index(root) == []


@linux
@pytest.mark.parametrize("engine", ALL)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_fetches_although_another_thread_held_every_lock(
    built, whole, engine
):
    store = TokenStore.open(built[0], "fp8", engine)
    store.fetch(range(100))
    are_held = threading.Event()
    may_end = threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in list(threads._locks):
                stack.enter_context(lock)
            are_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    are_held.wait()
    child = os.fork()
    if not child:
        # the default action of the signal ends a child that hangs
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if same_bits(store.fetch(range(SPEC.rows)), whole["fp8"]) else 2
        os._exit(code)
    may_end.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bits(store.fetch(range(SPEC.rows)), whole["fp8"])


def test_all_stores_together_open_a_part_of_the_allowed_files(many_shards):
    script = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from storage_formats import TokenStore
stores = []
for _ in range(9):
    stores.append(TokenStore.open(sys.argv[1], engine="mapped"))
    stores[-1].fetch(range(60))
print(sum(sys.argv[1] in os.readlink(f"/proc/self/fd/{fd}")
          for fd in os.listdir("/proc/self/fd")
          if os.path.lexists(f"/proc/self/fd/{fd}")))
"""
    command = [sys.executable, "-c", script, str(many_shards[0])]
    assert int(subprocess.check_output(command, text=True)) <= 160
