"""Remote files are read in blocks: each block is requested once, and no failure reaches another read."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.images.remote import blocks
from edje_index.images.remote.blocks import KEPT_BLOCKS, REQUEST_BLOCKS, BlockReader

BLOCK = 1000
DATA = random.Random(0).randbytes(60 * BLOCK + 321)
SECONDS = 30  # longest time that a test waits for an event


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)


@dataclass
class Server:
    """Serves `DATA`. Before a request for the block `number` is answered, `before(number)` is called."""

    before: Callable[[int], None] = lambda number: None
    requests: list[tuple[int, int]] = field(default_factory=list)

    def read_at(self, size: int, offset: int) -> bytes:
        self.requests.append((offset // BLOCK, -(-size // BLOCK)))
        self.before(offset // BLOCK)
        return DATA[offset : offset + size]

    def opened(self) -> BlockReader:
        return BlockReader(self.read_at, len(DATA))


def in_background() -> bool:
    return threading.current_thread().name == "edje-read-ahead"


def end_of_read_ahead() -> None:
    for thread in threading.enumerate():
        if thread.name == "edje-read-ahead":
            thread.join(SECONDS)
            assert not thread.is_alive()


@given(st.lists(st.tuples(st.integers(0, len(DATA) + 10), st.integers(0, 9 * BLOCK)), max_size=9))
def test_any_ranges(ranges: list[tuple[int, int]]) -> None:
    reader = Server().opened()
    for offset, size in ranges:
        assert reader.pread(size, offset) == DATA[offset : offset + size]


@pytest.mark.parametrize("step", [100, 999, 1000, 7777])
def test_sequential_reads_request_each_block_once_and_ahead(step: int) -> None:
    server, ahead = Server(), []
    server.before = lambda number: ahead.append(number) if in_background() else None
    reader = server.opened()
    assert b"".join(reader.pread(step, offset) for offset in range(0, len(DATA), step)) == DATA
    end_of_read_ahead()
    assert sorted(number + each for number, count in server.requests for each in range(count)) == list(range(61))
    assert max(count for _, count in server.requests) == REQUEST_BLOCKS
    assert sum(count for number, count in server.requests if number in ahead) > 40


def test_jumps_request_one_block_each() -> None:
    server = Server()
    reader = server.opened()
    for number in range(0, 60, 3):
        assert reader.pread(10, number * BLOCK) == DATA[number * BLOCK : number * BLOCK + 10]
    assert server.requests == [(number, 1) for number in range(0, 60, 3)]


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
def test_a_failed_read_ahead_shows_when_its_block_is_read(lasting: bool, kind: type[BaseException]) -> None:
    def fail(number: int) -> None:
        if in_background():
            raise kind(f"no block {number}")
        if lasting and number == 2:
            raise ConnectionError(f"no block {number}")

    server = Server(fail)
    reader = server.opened()
    for offset in range(0, 2 * BLOCK, 100):  # the blocks 2 and 3 are requested ahead, once
        assert reader.pread(100, offset) == DATA[offset : offset + 100]
    end_of_read_ahead()
    assert sorted(server.requests) == [(0, 1), (1, 1), (2, 2)]
    if lasting:
        with pytest.raises(ConnectionError, match="no block 2"):
            reader.pread(100, 2 * BLOCK)
        assert [number for number, _ in server.requests].count(2) == 2
        end_of_read_ahead()
        server.before = lambda number: None
    assert reader.pread(100, 2 * BLOCK) == DATA[2 * BLOCK : 2 * BLOCK + 100]


def test_threads_that_wait_for_one_request_share_its_error_or_block() -> None:
    waiting, entered = threading.Event(), threading.Event()

    def fail(number: int) -> None:
        entered.set()
        assert waiting.wait(SECONDS)
        raise ConnectionError("no server")

    server = Server(fail)
    reader = server.opened()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.pread, 10, 0)
        assert entered.wait(SECONDS)
        second = pool.submit(reader.pread, 10, 20)
        _wait_until(lambda: bool(reader._blocks[0].data._condition._waiters))
        waiting.set()
        assert isinstance(first.exception(SECONDS), ConnectionError)
        assert isinstance(second.exception(SECONDS), ConnectionError)
    assert len(server.requests) == 1


def test_an_interrupted_request_holds_up_nobody() -> None:
    waiting, entered = threading.Event(), threading.Event()

    def interrupt_first(number: int) -> None:
        if len(server.requests) == 1:
            entered.set()
            assert waiting.wait(SECONDS)
            raise KeyboardInterrupt

    server = Server(interrupt_first)
    reader = server.opened()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.pread, 10, 0)
        assert entered.wait(SECONDS)
        second = pool.submit(reader.pread, 10, 20)
        _wait_until(lambda: bool(reader._blocks[0].data._condition._waiters))
        waiting.set()
        assert isinstance(first.exception(SECONDS), KeyboardInterrupt)
        assert second.result(SECONDS) == DATA[20:30]


def test_closing_during_a_read_ahead_waits_for_nothing_and_leaves_nothing() -> None:
    released, entered = threading.Event(), threading.Event()

    def block_ahead(number: int) -> None:
        if in_background():
            entered.set()
            assert released.wait(SECONDS)

    reader = Server(block_ahead).opened()
    for number in range(2):
        reader.pread(10, number * BLOCK)
    assert entered.wait(SECONDS)
    reader.close()
    assert not released.is_set()
    assert reader._blocks == {}
    released.set()
    end_of_read_ahead()
    assert reader._blocks == {}


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    block = 1 << 16
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    reader = BlockReader(lambda size, offset: bytes(size), 100 * block)
    tracemalloc.start()
    for offset in range(0, 100 * block, 1000):
        reader.pread(1000, offset)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (KEPT_BLOCKS + 3 * REQUEST_BLOCKS) * block


def test_a_server_that_sends_too_little_ends_the_read() -> None:
    reader = BlockReader(lambda size, offset: b"", 10)
    with pytest.raises(EOFError):
        reader.pread(10, 0)


def _wait_until(is_true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(SECONDS * 1000):
        if is_true():
            return
        pause.wait(0.001)
    raise AssertionError("the thread does not wait")
