"""Every engine returns the same blocks and reports lost data."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_formats import CorruptIndexError, TokenStore, UsageError, codec
from storage_formats.codecs import nontemporal
from storage_formats.errors import MachineError
from storage_formats.format.layout import Layout
from storage_formats.reading import buffered, copying, engines, memory, queued
from storage_formats.reading.aio import AioQueue, aio_works
from storage_formats.reading.base import PIECE_RECORDS, Batch, Runs
from storage_formats.reading.destination import DecodedDestination, read_batch, record_destinations
from storage_formats.reading.files import ShardFiles
from storage_formats.reading.mapped import MappedEngine
from storage_formats.reading.queued import _QueuedReader
from storage_formats.reading.queues import QueuePool
from storage_formats.reading.ring import Ring, io_uring_works
from storage_formats.reading.syscalls import sector_bytes
from tests.conftest import REPO, same_bits
from tests.storage_formats.reading_cases import ALL, HOLES, ODD, SPEC, evict, linux


def test_plain_slicing_is_the_reference(built, whole):
    assert same_bits(whole["bf16"], built[1])


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", SPEC.precisions)
@given(ids=st.lists(st.integers(0, SPEC.rows - 1), max_size=200))
@settings(max_examples=10, deadline=None)
def test_every_engine_equals_plain_slicing(built, whole, precision, engine, ids):
    with TokenStore.open(built[0], precision, engine) as store:
        assert same_bits(store.fetch(ids), whole[precision][ids].reshape(-1, *SPEC.block_shape))


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", ODD.precisions)
def test_records_that_are_not_whole_sectors(odd, precision, engine):
    expected = TokenStore.open(odd[0], precision, "portable").fetch(range(ODD.rows))
    ids = np.random.default_rng(0).integers(0, ODD.rows, 200)
    assert same_bits(TokenStore.open(odd[0], precision, engine).fetch(ids), expected[ids])


@linux
@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_cold_files(built, whole, precision, engine):
    ids = np.random.default_rng(2).integers(0, SPEC.rows, 250)
    evict(built[0], precision)
    assert same_bits(TokenStore.open(built[0], precision, engine).fetch(ids), whole[precision][ids])


@linux
@pytest.mark.parametrize("engine", sorted({"io_uring", "direct"} & set(engines())))
@pytest.mark.parametrize(
    ("records", "reads"), [(0, [(0, 1), (2, 1), (5, 1), (6, 1)]), (1, [(0, 3), (5, 2)]), (2, [(0, 7)])]
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_small_gaps_are_read_to_save_a_request(built, whole, precision, engine, records, reads, monkeypatch):
    """Reads rows 0, 2, 5 and 6. The last two are apart in memory."""
    if sector_bytes(Layout(built[0]).token_shard("bf16", 0)) != 512:
        pytest.skip("records of this test are no whole sectors here")
    size = codec(precision, SPEC.block_shape).record_bytes
    monkeypatch.setattr("storage_formats.reading.engine_selection._GAP_BYTES", records * size)
    asked, ids = [], [6, 0, 5, 2]
    for kind in (Ring, AioQueue):
        real = kind.put

        def put(self, fds, offsets, addresses, lengths, tags, real=real):
            asked.extend(zip((offsets + size - 1) // size, lengths // size, strict=True))
            return real(self, fds, offsets, addresses, lengths, tags)

        monkeypatch.setattr(kind, "put", put)
    with TokenStore.open(built[0], precision, engine) as store:
        assert same_bits(store.fetch(ids), whole[precision][ids])
    if size % 512 == 0:
        assert asked == reads
    else:
        assert len(asked) == (len(reads) - 1 if not records else len(reads))  # 5 and 6 are adjacent in the buffer


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_any_output_memory_works(built, engine, offset):
    memory = np.zeros(SPEC.rows * 256 + 512, dtype=ml_dtypes.bfloat16)
    out = memory[offset : offset + SPEC.rows * 256].reshape(SPEC.rows, 8, 32)
    ids = np.random.default_rng(1).permutation(SPEC.rows)
    assert TokenStore.open(built[0], engine=engine).fetch(ids, out=out) is out
    assert same_bits(out, built[1][ids])
    assert not memory[:offset].any()
    assert not memory[offset + SPEC.rows * 256 :].any()


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_fetch_records_returns_the_stored_bytes(built, whole, precision, engine):
    store = TokenStore.open(built[0], precision, engine)
    ids = np.random.default_rng(3).integers(0, SPEC.rows, 150)
    records = store.fetch_records(ids)
    assert records.shape == (150, store.record_bytes)
    assert same_bits(codec(precision, SPEC.block_shape).decode(records), whole[precision][ids])
    out = np.empty_like(records)
    assert store.fetch_records(ids, out=out) is out
    assert (out == records).all()
    assert store.fetch_records([]).shape == (0, store.record_bytes)
    with pytest.raises(UsageError, match="out must be a writeable C-contiguous uint8 array"):
        store.fetch_records([0], out=out)


def noting(calls, name, function):
    """`function`, which also appends `name` to `calls`."""
    return lambda *arguments: (calls.append(name), function(*arguments))[1]


@pytest.mark.parametrize(
    ("loop", "size"), [("ctypes", 100), ("compiled", 100), ("nontemporal", 192), ("nontemporal", 64)]
)
def test_memory_is_copied_piece_by_piece(loop, size, monkeypatch):
    if loop == "ctypes":
        monkeypatch.delitem(sys.modules, "numba", raising=False)  # as before the first conversion
    else:
        monkeypatch.setattr(memory, "_COMPILED_COPY_FROM", 0)
    monkeypatch.setattr(nontemporal, "NONTEMPORAL_FROM", 0 if loop == "nontemporal" else 1 << 30)
    loops_used = []
    for name in ("copy_pieces", "copy_pieces_nontemporal"):
        monkeypatch.setattr(copying, name, noting(loops_used, name, getattr(copying, name)))
    memory._compiled_loop.cache_clear()
    monkeypatch.setattr(ctypes, "memmove", noting(loops_used, "memmove", ctypes.memmove))
    source = np.random.default_rng(0).integers(0, 256, (50, size), dtype=np.uint8)
    target = memory.aligned_bytes(60 * size).reshape(60, size)
    where = np.random.default_rng(1).permutation(60)[:50]
    memory.copy_memory(source.ctypes.data + np.arange(50) * size, target.ctypes.data + where * size, size, threads=3)
    assert (target[where] == source).all()
    assert not np.delete(target, where, axis=0).any()
    memory._compiled_loop.cache_clear()
    expected = {"ctypes": "memmove", "compiled": "copy_pieces", "nontemporal": "copy_pieces_nontemporal"}[loop]
    assert set(loops_used) == {expected}


def test_only_large_outputs_of_whole_cache_lines_use_nontemporal_stores():
    large = nontemporal.NONTEMPORAL_FROM
    assert nontemporal.use_nontemporal(large, 128, 640)
    assert nontemporal.use_nontemporal(large, 128, np.array([64, 0]))
    assert not nontemporal.use_nontemporal(large - 1, 128, 640)
    assert not nontemporal.use_nontemporal(large, 100, 640)
    assert not nontemporal.use_nontemporal(large, 128, np.array([64, 8]))


def test_memory_for_out_is_aligned(built):
    store = TokenStore.open(built[0])
    out = store.empty(20_000)  # 10 MB, in huge pages if the system has them
    assert out.shape == (20_000, 8, 32)
    assert out.ctypes.data % mmap.PAGESIZE == 0
    assert store.fetch(range(20), out=out[:20]) is not None
    assert same_bits(out[:20], built[1][:20])


@pytest.mark.parametrize("engine", ALL)
def test_every_engine_returns_holes_as_nan(built, engine):
    store = TokenStore.open(built[0], "fp8", engine)
    assert set(np.flatnonzero(store.holes(store.fetch(range(SPEC.rows))))) == HOLES
    assert store.fetch([]).shape == (0, 8, 32)


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
    store.fetch([0, 85])
    with pytest.raises(CorruptIndexError, match="edje-index verify"):
        store.fetch([0, 55, 85])
    assert store.fetch([0, 85]).shape == (2, 3, 7), "the store goes on"


@linux
@pytest.mark.parametrize("engine", [name for name in ALL if name not in ("mapped", "auto")])
def test_a_file_that_shrank_while_it_was_open_is_an_error(odd, tmp_path, engine):
    shutil.copytree(odd[0], tmp_path, dirs_exist_ok=True)
    store = TokenStore.open(tmp_path, engine=engine)
    store.fetch([45])
    os.truncate(Layout(tmp_path).token_shard("bf16", 1), 0)
    with pytest.raises(CorruptIndexError, match="edje-index verify"):
        store.fetch([50])


_SHORTENED_WHILE_MAPPED = """
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
        print(error)
    print(store.fetch(range(64)).shape)
"""


@linux
@pytest.mark.parametrize("engine", ["auto", "mapped"])
def test_a_file_that_shrank_while_it_was_mapped_is_an_error(built, tmp_path, engine):
    """In a process of its own, which a read past the end of a map would kill. The sampled record is still there."""
    shutil.copytree(built[0], tmp_path, dirs_exist_ok=True)
    command = [sys.executable, "-c", _SHORTENED_WHILE_MAPPED, str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert "was shortened from" in done.stdout
    assert "run 'edje-index verify'" in done.stdout
    assert done.stdout.splitlines()[-1] == "(64, 8, 32)"


@linux
@pytest.mark.parametrize("engine", ["buffered", "portable"])
def test_an_error_leaves_no_file_open(built, tmp_path, engine):
    shutil.copytree(built[0], tmp_path, dirs_exist_ok=True)
    store = TokenStore.open(tmp_path, engine=engine)
    os.truncate(Layout(tmp_path).token_shard("bf16", 1), 0)
    with pytest.raises(CorruptIndexError):
        store.fetch(range(SPEC.rows))  # three pieces
    store.close()
    opened = [os.readlink(path.path) for path in os.scandir("/proc/self/fd") if os.path.exists(path.path)]
    assert not [name for name in opened if name.startswith(str(tmp_path))]


def test_threads_read_a_piece_into_one_buffer(built, monkeypatch):
    """The buffer is allocated before the threads start, because `cached_property` has no lock since Python 3.12."""
    allocate = DecodedDestination.records.func
    monkeypatch.setattr(DecodedDestination, "records", property(allocate))  # allocates at every access
    asked = []
    monkeypatch.setattr(buffered, "read_fully", lambda request, records, size: asked.append(records.ctypes.data))
    TokenStore.open(built[0], "fp8", "portable", verify_reads=False).fetch(range(0, 60, 3))
    assert len(asked) == 20
    assert len(set(asked)) == 1


def test_queues_are_small_if_the_kernel_has_little_memory():
    asked = []

    def make(entries):
        asked.append(entries)
        if entries > 200:
            raise OSError(errno.ENOMEM, "no memory")
        return entries

    assert QueuePool(make).borrow() == asked[-1] == PIECE_RECORDS
    with pytest.raises(PermissionError):
        QueuePool(lambda entries: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no"))).borrow()


@linux
def test_too_many_open_files_are_not_reported_as_damage(odd, monkeypatch):
    real = os.open

    def refuse(path, *rest, **named):
        if "tokens" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match="raise the limit on open files"):
        TokenStore.open(odd[0]).fetch([0])


def test_few_maps_are_open_at_the_same_time(many_shards, monkeypatch):
    monkeypatch.setattr("storage_formats.reading.mapped._OPEN_SHARDS", 2)
    monkeypatch.setattr("storage_formats.reading.files.open_files", lambda: 2)
    held, real = [], ShardFiles.acquire
    monkeypatch.setattr(
        ShardFiles, "acquire", lambda self, batch: held.append(len(batch.shard_spans)) or real(self, batch)
    )
    root, expected = many_shards
    bf16 = codec("bf16", (2, 8))
    engine = MappedEngine(ShardFiles(lambda shard: Layout(root).token_shard("bf16", shard), bf16.record_bytes))
    row_ids = np.random.default_rng(0).permutation(60)
    order = np.argsort(row_ids)
    batch = Batch(*np.divmod(row_ids[order], 4), out_indices=order)
    out = memory.aligned_blocks(60, (2, 8))
    raw = record_destinations(out.view(np.uint8).reshape(60, -1))
    for destinations in (raw, lambda piece: DecodedDestination(bf16, out, piece.out_indices, memory.BufferPool())):
        held.clear()
        out[:] = 0
        read_batch(engine, batch, destinations)
        assert same_bits(out, expected[row_ids])
        assert max(held) == 2
        assert len(held) == 8  # of 15 shards


class _Crowd:
    """A reader for a queue of 66 requests, whose pieces take the given numbers of requests."""

    piece_records = 1

    def __init__(self, requests):
        self.requests, self.flying, self.most = list(requests), [], 0

    @property
    def ahead(self):
        return len(self.flying) + (sum(self.flying) + 64 <= 66)

    def start(self, batch, destination):
        self.flying.append(self.requests.pop(0))
        self.most = max(self.most, sum(self.flying))
        return lambda: self.flying.pop(0)

    def reader(self):
        return self

    def close(self):
        assert not self.flying


def test_sparse_pieces_after_dense_ones_do_not_overfill_the_queue():
    crowd, count = _Crowd([1] * 3 + [64] * 5), 8
    batch = Batch(np.zeros(count, np.int64), np.arange(count), np.arange(count))
    read_batch(crowd, batch, record_destinations(np.zeros((count, 4), np.uint8)))
    assert not crowd.requests
    assert crowd.most <= 66


@pytest.mark.skipif(not io_uring_works(), reason="no io_uring here")
def test_a_ring_is_set_up_without_flags_that_the_kernel_does_not_know(monkeypatch):
    from storage_formats.reading import ring

    asked, real = [], ring.system_call

    def old_kernel(number, entries, parameters, *rest):
        if number == ring._SETUP:
            flags = int(np.ctypeslib.as_array((ctypes.c_uint32 * 3).from_address(parameters))[2])
            asked.append(flags)
            if flags & ring._SETUP_COOP_TASKRUN:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(number, entries, parameters, *rest)

    monkeypatch.setattr(ring, "system_call", old_kernel)
    assert Ring(4).entries == 4
    assert len(asked) == 2


@pytest.mark.parametrize("engine", ALL)
def test_threads_share_an_engine(built, whole, engine):
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, SPEC.rows, 100) for _ in range(40)]
    with TokenStore.open(built[0], "fp8", engine) as store, ThreadPoolExecutor(8) as pool:
        for ids, blocks in zip(requests, pool.map(store.fetch, requests), strict=True):
            assert same_bits(blocks, whole["fp8"][ids])


@linux
@pytest.mark.parametrize("engine", ALL)
def test_a_store_may_be_closed_while_other_threads_fetch(many_shards, engine):
    root, expected = many_shards
    ended = threading.Event()

    def fetch_often() -> bool:
        return all(same_bits(store.fetch(range(60)), expected) for _ in range(40))

    with TokenStore.open(root, engine=engine) as store, ThreadPoolExecutor(3) as threads:
        closing = threads.submit(lambda: [store.close() for _ in iter(lambda: ended.wait(1e-4), True)])
        try:
            for fetching in [threads.submit(fetch_often) for _ in range(2)]:
                assert fetching.result()
        finally:
            ended.set()
        assert closing.result()


@pytest.mark.parametrize("engine", ALL)
def test_few_files_are_open_and_none_after_close(many_shards, engine, monkeypatch):
    monkeypatch.setattr("storage_formats.reading.files.open_files", lambda: 2)
    root, expected = many_shards
    before = len(os.listdir("/proc/self/fd"))
    store = TokenStore.open(root, engine=engine)
    for _ in range(2):
        assert same_bits(store.fetch(range(60)), expected)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 2 + 1  # cached and direct files, one queue
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert same_bits(store.fetch([59]), expected[[59]])
    del store
    assert len(os.listdir("/proc/self/fd")) == before


@linux
@pytest.mark.parametrize("engine", ALL)
def test_signals_do_not_disturb_reads(built, whole, engine):
    """A signal handler runs every half millisecond. Interrupted system calls are resumed."""
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    store = TokenStore.open(built[0], "fp8", engine)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while len(fired) < 50:
            evict(built[0], "fp8")
            assert same_bits(store.fetch(range(SPEC.rows)), whole["fp8"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_reads_served_in_part_are_continued(built, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:100]], offset))
    for engine in {"buffered", "portable"} & set(engines()):
        assert same_bits(TokenStore.open(built[0], engine=engine).fetch(range(70)), built[1][:70])


@pytest.mark.parametrize("queue", [Ring, AioQueue])
@pytest.mark.parametrize("result", [-errno.EAGAIN, -errno.EIO, 0, 100])
def test_requests_that_the_kernel_fails_are_read_again(built, monkeypatch, queue, result):
    engine = {Ring: "io_uring", AioQueue: "direct"}[queue]
    if engine not in engines():
        pytest.skip(f"no {engine} here")
    put, wait, memory = queue.put, queue.wait, {}

    def noting(self, fds, offsets, addresses, lengths, tags):
        memory.update(zip(tags.tolist(), zip(addresses.tolist(), lengths.tolist(), strict=True), strict=True))
        put(self, fds, offsets, addresses, lengths, tags)

    def failing(self, minimum):
        tags, results = wait(self, minimum)
        for tag in tags[tags % 3 == 0].tolist():
            address, length = memory[tag]
            ctypes.memset(address + max(result, 0), 0xAB, length - max(result, 0))
        return tags, np.where(tags % 3 == 0, result, results)

    monkeypatch.setattr(queue, "put", noting)
    monkeypatch.setattr(queue, "wait", failing)
    for precision in ("bf16", "fp8"):
        for step in (1, 2):  # without and with gaps between the rows
            ids = range(0, SPEC.rows, step)
            expected = TokenStore.open(built[0], precision, "portable").fetch(ids)
            assert same_bits(TokenStore.open(built[0], precision, engine).fetch(ids), expected)


@pytest.mark.parametrize("queue", [Ring, AioQueue])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_last_records_are_processed_while_others_are_in_flight(built, monkeypatch, queue, precision):
    engine = {Ring: "io_uring", AioQueue: "direct"}[queue]
    if engine not in engines():
        pytest.skip(f"no {engine} here")
    wait, process = queue.wait, _QueuedReader._process
    late, processed = {}, []

    def one_by_one(self, minimum):
        """The results in the order of the tags, no more than necessary: the device is slow."""
        results = late.setdefault(self, {})
        if len(results) < minimum:
            results.update(zip(*(values.tolist() for values in wait(self, self.in_flight)), strict=True))
        tags = sorted(results)[:minimum]
        self.in_flight = len(results) - minimum
        return np.array(tags), np.array([results.pop(tag) for tag in tags])

    def noting(self, flight):
        before = flight.processed.sum()
        process(self, flight)
        processed.append(flight.processed.sum() - before)

    monkeypatch.setattr(queue, "wait", one_by_one)
    monkeypatch.setattr(_QueuedReader, "_process", noting)
    monkeypatch.setattr(queued, "_PART_REQUESTS", 1)
    monkeypatch.setattr(queued, "_PART_SHARE", 2 * PIECE_RECORDS)
    ids = np.arange(PIECE_RECORDS)[::-1]
    expected = TokenStore.open(built[0], precision, "portable").fetch(ids)
    assert same_bits(TokenStore.open(built[0], precision, engine).fetch(ids), expected)
    # one request for each record that is read into its destination, and for each shard that is read into a buffer
    assert processed == [1] * (PIECE_RECORDS if precision == "bf16" else 2)


@pytest.mark.parametrize("queue", [Ring, AioQueue])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_last_results_may_all_be_those_of_another_piece(built, monkeypatch, queue, precision):
    engine = {Ring: "io_uring", AioQueue: "direct"}[queue]
    if engine not in engines():
        pytest.skip(f"no {engine} here")
    wait, late, other = queue.wait, {}, []

    def newest_first(self, minimum):
        """The results in descending order of the tags, no more than necessary."""
        results = late.setdefault(self, {})
        if len(results) < minimum:
            results.update(zip(*(values.tolist() for values in wait(self, self.in_flight)), strict=True))
        tags = sorted(results, reverse=True)[:minimum]
        self.in_flight = len(results) - minimum
        other.append(min(tags) >= PIECE_RECORDS)
        return np.array(tags), np.array([results.pop(tag) for tag in tags])

    monkeypatch.setattr(queue, "wait", newest_first)
    monkeypatch.setattr(queued, "_PART_REQUESTS", 1)
    monkeypatch.setattr(queued, "_PART_SHARE", 4 * PIECE_RECORDS)
    rows = len(TokenStore.open(built[0], precision))
    ids = np.arange(2 * PIECE_RECORDS)[::-1] % rows
    expected = TokenStore.open(built[0], precision, "portable").fetch(ids)
    assert same_bits(TokenStore.open(built[0], precision, engine).fetch(ids), expected)
    assert other[0], "the first result belonged to the second piece"


@linux
@pytest.mark.parametrize("engine", ALL)
def test_a_store_works_after_a_fork(built, whole, engine):
    store = TokenStore.open(built[0], "fp8", engine)
    store.fetch(range(100))
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if same_bits(store.fetch(range(SPEC.rows)), whole["fp8"]) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bits(store.fetch(range(SPEC.rows)), whole["fp8"])


@given(
    positions=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, unique=True).map(sorted),
    gap=st.integers(0, 3),
    size=st.sampled_from([1 << 10, 1 << 18, 1 << 21]),
)
def test_runs_cover_every_record_once_and_cross_no_shard(positions, gap, size):
    shards, places = np.array(positions).T
    batch = Batch(shards, places, np.arange(len(shards)))
    runs = Runs.of(batch, size, gap=gap)
    covered = [range(first, first + count) for first, count in zip(runs.first, runs.count, strict=True)]
    assert [index for run in covered for index in run] == list(range(len(batch)))
    for run in covered:
        assert len(set(shards[run])) == 1
        assert (np.diff(places[run]) <= gap + 1).all()
        assert len(run) == 1 or len(run) * size <= 1 << 20


@pytest.mark.parametrize("works", [io_uring_works, aio_works])
def test_probing_a_kernel_interface_is_cached(works):
    assert works() is works()
