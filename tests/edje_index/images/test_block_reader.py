"""Remote files are read in blocks: each block is requested once, and no failure
reaches another read.
"""

import random
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.inputs import ranges
from edje_index.inputs.ranges import AHEAD_BLOCKS, KEPT_BLOCKS, BlockReader

BLOCK = 1000
DATA = random.Random(0).randbytes(60 * BLOCK + 321)
# longest time that a test waits for an event
SECONDS = 30


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(ranges, "BLOCK_BYTES", BLOCK)


@dataclass
class Server:
    """Serves `DATA`. Before a request for the block `number` is answered,
    `before(number)` is called.
    """

    before: Callable[[int], None] = lambda number: None
    requests: list[int] = field(default_factory=list)

    def read_at(self, size, offset):
        self.requests.append(offset // BLOCK)
        self.before(offset // BLOCK)
        return DATA[offset : offset + size]

    def opened(self):
        return BlockReader(self.read_at, len(DATA))


def end_of_requests(reader):
    assert not wait(reader._blocks.values(), SECONDS).not_done


@given(
    st.lists(
        st.tuples(st.integers(0, len(DATA) + 10), st.integers(0, 9 * BLOCK)), max_size=9
    )
)
def test_any_ranges(ranges):
    reader = Server().opened()
    for offset, size in ranges:
        assert reader.pread(size, offset) == DATA[offset : offset + size]


@pytest.mark.parametrize("step", [999, 1000, 7777])
def test_sequential_reads_request_each_block_once_and_ahead(step):
    server = Server()
    read_up_to = 0
    ahead = 0
    reader = server.opened()
    for offset in range(0, len(DATA), step):
        assert reader.pread(step, offset) == DATA[offset : offset + step]
        end_of_requests(reader)
        read_up_to = min(offset + step - 1, len(DATA) - 1) // BLOCK
        ahead = max(ahead, max(server.requests) - read_up_to)
    assert sorted(server.requests) == list(range(61))
    assert ahead == AHEAD_BLOCKS


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_read_ahead_shows_when_its_block_is_read(failures):
    def fail(number):
        if number == 2 and server.requests.count(2) <= failures:
            raise ConnectionError(f"no block {number}")

    server = Server(fail)
    reader = server.opened()
    # the blocks 2 and 3 are requested ahead, once
    for offset in range(0, 2 * BLOCK, 100):
        assert reader.pread(100, offset) == DATA[offset : offset + 100]
    end_of_requests(reader)
    assert sorted(server.requests) == [0, 1, 2, 3]
    if failures == 2:
        with pytest.raises(OSError, match="no block 2"):
            reader.pread(100, 2 * BLOCK)
    assert reader.pread(100, 2 * BLOCK) == DATA[2 * BLOCK : 2 * BLOCK + 100]


def test_a_reader_that_waits_for_a_failed_request_sends_its_own():
    released = threading.Event()
    entered = threading.Event()

    def fail_first(number):
        if len(server.requests) == 1:
            entered.set()
            assert released.wait(SECONDS)
            raise ConnectionError("no server")

    server = Server(fail_first)
    reader = server.opened()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.pread, 10, 0)
        assert entered.wait(SECONDS)
        second = pool.submit(reader.pread, 10, 20)
        released.set()
        assert isinstance(first.exception(SECONDS), ConnectionError)
        assert second.result(SECONDS) == DATA[20:30]


def test_the_memory_is_bounded(monkeypatch):
    block = 1 << 16
    monkeypatch.setattr(ranges, "BLOCK_BYTES", block)
    reader = BlockReader(lambda size, offset: bytes(size), 100 * block)
    tracemalloc.start()
    for offset in range(0, 100 * block, 1000):
        reader.pread(1000, offset)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (KEPT_BLOCKS + AHEAD_BLOCKS) * block
