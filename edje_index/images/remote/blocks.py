"""Reads a remote file in blocks, for parsers that read it in small steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edje_index.images.ranges import ReadAt

BLOCK_BYTES = 1 << 20
REQUEST_BLOCKS = 4
"""Largest number of blocks of one request."""

AHEAD_BLOCKS = 8
"""Largest number of blocks ahead of a reader: two requests, so that one is under way while the other is read."""

KEPT_BLOCKS = 16
"""Largest number of blocks that stay in memory, requested ones included. A block keeps the bytes of its whole request,
so a reader takes a little more than `KEPT_BLOCKS` blocks if it reads forward, and never `REQUEST_BLOCKS` times as much.
"""


class _AbandonedError(Exception):
    """The thread that requested a block has ended without it. Who needs the block requests it again."""


@dataclass
class _Block:
    """A block that is in memory or requested.

    Attributes:
        data: the bytes, once they have arrived.
        run: number of consecutive blocks, up to this one, that were read; 0 if this block was not read yet.
    """

    data: Future[memoryview] = field(default_factory=Future)
    run: int = 0


class BlockReader:
    """Reads byte ranges of a file in blocks, and keeps the latest blocks in memory. Thread-safe.

    If consecutive blocks are read, a thread requests the following blocks ahead. If its request fails, the blocks are
    requested again when they are read, and only an error of the second request is raised.

    Args:
        read_at: function that requests a byte range of the file. Threads call it at the same time.
        length: number of bytes of the file.
        daemon: whether the process may end during a request ahead.
    """

    def __init__(self, read_at: ReadAt, length: int, *, daemon: bool = False) -> None:
        self._read_at = read_at
        self._daemon = daemon
        self._length = length
        self._lock = threading.RLock()  # the garbage collector may call `close` in the thread that holds it
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._closed = False

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes [offset, offset + size), or fewer if the file ends earlier.

        Raises:
            Exception: any exception of `read_at`.
        """
        stop = min(offset + size, self._length)
        parts = []
        while offset < stop:
            number, start = divmod(offset, BLOCK_BYTES)
            last = (stop - 1) // BLOCK_BYTES
            parts.append(self._read(number, last)[start : start + stop - offset])
            offset += len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Forget all blocks and request none ahead. A request that is under way ends by itself; its bytes are lost."""
        with self._lock:
            self._closed = True
            self._blocks.clear()

    def _read(self, number: int, last: int) -> memoryview:
        """Return block `number`. The caller needs the blocks up to `last` next."""
        while True:
            missing: dict[int, _Block] = {}
            ahead: dict[int, _Block] = {}
            try:
                with self._lock:
                    if number not in self._blocks:
                        self._claim(number, last, missing)
                    block = self._blocks[number]
                    self._blocks.move_to_end(number)
                    self._claim_ahead(number, ahead)
                if ahead:
                    self._start_ahead(ahead)
                    ahead = {}
                if missing:
                    self._fetch(missing)
            except BaseException as error:  # also an interrupt, after which other threads must not wait for the blocks
                self._drop(missing, error if isinstance(error, Exception) else _AbandonedError())
                self._drop(ahead, _AbandonedError())
                raise
            try:
                return block.data.result()
            except _AbandonedError:
                continue

    def _claim(self, first: int, last: int, claimed: dict[int, _Block]) -> None:
        """Add the missing blocks of one request for the blocks [first, last] to `claimed`. The caller fetches them."""
        for number in range(first, min(last + 1, first + REQUEST_BLOCKS, -(-self._length // BLOCK_BYTES))):
            if number in self._blocks:
                break
            claimed[number] = self._blocks[number] = _Block()
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)

    def _claim_ahead(self, number: int, claimed: dict[int, _Block]) -> None:
        """Note that block `number` is read. If the reads are sequential, claim the blocks to request ahead."""
        block = self._blocks[number]
        if block.run:
            return
        previous = self._blocks.get(number - 1)
        block.run = 1 + (previous.run if previous else 0)
        window = min(2 * (block.run - 1), AHEAD_BLOCKS)
        if number + window // 2 in self._blocks or self._closed:  # enough is requested
            return
        first = next(each for each in range(number + 1, number + window + 1) if each not in self._blocks)
        self._claim(first, number + window, claimed)

    def _start_ahead(self, blocks: dict[int, _Block]) -> None:
        try:
            threading.Thread(
                target=self._fetch_ahead, args=(blocks,), name="edje-read-ahead", daemon=self._daemon
            ).start()
        except RuntimeError:  # the system allows no further thread
            self._drop(blocks, _AbandonedError())

    def _fetch_ahead(self, blocks: dict[int, _Block]) -> None:
        try:
            self._fetch(blocks)
        except BaseException:  # `_read` requests the block again, and raises the error if there is one then
            self._drop(blocks, _AbandonedError())

    def _fetch(self, blocks: dict[int, _Block]) -> None:
        """Request consecutive blocks, and hand them to all threads that wait for them."""
        start = min(blocks) * BLOCK_BYTES
        size = min(len(blocks) * BLOCK_BYTES, self._length - start)
        data = memoryview(self._read_at(size, start))
        if len(data) != size:
            raise EOFError(f"the file ends before byte {start + size}")
        with self._lock:
            for position, block in enumerate(blocks.values()):
                if not block.data.done():
                    block.data.set_result(data[position * BLOCK_BYTES : (position + 1) * BLOCK_BYTES])

    def _drop(self, blocks: dict[int, _Block], error: Exception) -> None:
        """Forget requested blocks that have not arrived. Raise `error` in the threads that wait for them."""
        with self._lock:
            for number, block in blocks.items():
                if block.data.done():
                    continue
                block.data.set_exception(error)
                if self._blocks.get(number) is block:
                    del self._blocks[number]
