"""The array of the caller, which receives checked records unchanged or decoded, or
their scores.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import BF16, Codec, Records
from storage_formats.format.checksum import crc32c
from storage_formats.reading.batch import Batch, Ints, Part
from storage_formats.reading.checksums import BlockCheck
from storage_formats.reading.memory import BufferPool, Bytes, memory_at
from storage_formats.threads import run_chunks

# as in `reading.loops`, which imports Numba
NO_COPY, COPY, COPY_NONTEMPORAL = range(3)
_COMPILED_FROM = 32 << 20
# without Numba, checks of this many bytes lose about as much time as its import takes
_COMPILED_AFTER = 4 << 30
_LINE_BYTES = 64
# at a time: they stay in the processor's cache between check, decoding and product
_SCORED_RECORDS = 16
_NONTEMPORAL_FROM = 32 << 20
"""Minimum size in bytes of an output for non-temporal stores, which bypass the
processor's cache. Copies of 480 MB are twice as fast with them
(docs/lab/storage-io.md). Smaller outputs are read next, so they stay in the cache.
"""


_buffers = BufferPool()


class Destination:
    """Receives the records of a batch, compares their checksums, and decodes them.

    An engine reads records into memory of its own and passes the memory to `take`. If
    `records` is not None, it may read them into `records` instead, record i of the
    batch into `records[batch.out_indices[i]]`, and then call `check`.

    Args:
        out: array for the blocks, bfloat16 [k, m, d], or for the records, uint8 [k,
            record_bytes], or for the scores, float32 [k].
        find_check: function that returns the stored checksums of a batch. It may read
            files, so it is called after the first records have arrived.
        query: query vectors [q, d] if `out` receives the MaxSim of the query and each
            block.
    """

    def __init__(
        self,
        batch: Batch,
        out: NDArray[Any],
        codec: Codec,
        find_check: Callable[[Batch], BlockCheck],
        query: NDArray[np.float32] | None = None,
    ) -> None:
        self.batch = batch
        self.records: Records | None = None
        if query is None and (out.dtype == np.uint8 or codec.name == "bf16"):
            self.records = out.view(np.uint8).reshape(len(out), codec.record_bytes)
        self._out = out
        self._codec = codec
        self._find_check = find_check
        self._query = query

    @functools.cached_property
    def _check(self) -> BlockCheck:
        return self._find_check(self.batch)

    def take(
        self, memory: Bytes, offsets: Ints, part: Part, threads: int | None = None
    ) -> None:
        """Check and write the records `batch[part]`. They start at the byte offsets
        `offsets` [k] of `memory`.
        """
        check = self._check[part]
        size = self._codec.record_bytes
        if self._query is not None:
            self._score(self._query, memory, offsets, part, threads)
        elif self.records is None:
            in_memory = _memory_check(memory.ctypes.data + offsets, size, check)
            self._codec.scatter(
                memory,
                (offsets, self.batch.out_indices[part]),
                self._out,
                threads,
                in_memory,
            )
        else:
            # a thread that works on after an interruption keeps the memory alive
            sources = memory.ctypes.data + offsets
            targets = self._addresses(part)
            _copy(sources, targets, size, check.compare, threads, held=(memory, self))

    def _score(
        self,
        query: NDArray[np.float32],
        memory: Bytes,
        offsets: Ints,
        part: Part,
        threads: int | None,
    ) -> None:
        """Check, decode and score the records `batch[part]`, see `take`."""
        from storage_formats.codecs.kernels import max_sim

        m, d = self._codec.block_shape
        vectors = len(query)
        out_indices = self.batch.out_indices[part]
        check = _memory_check(
            memory.ctypes.data + offsets, self._codec.record_bytes, self._check[part]
        )
        padded = np.concatenate(
            [query, np.zeros((-vectors % 4, d), np.float32)]
        ).reshape(-1)
        order = np.arange(_SCORED_RECORDS)

        def score(start: int, stop: int) -> None:
            buffer = _buffers.borrow(_SCORED_RECORDS * 2 * m * d)
            scores = np.empty(_SCORED_RECORDS, np.float32)
            decoded = buffer[: _SCORED_RECORDS * 2 * m * d].view(BF16).reshape(-1, m, d)
            for first in range(start, stop, _SCORED_RECORDS):
                records = slice(first, min(first + _SCORED_RECORDS, stop))
                check(first, records.stop)
                blocks = order[: records.stop - first]
                words = decoded.view(np.uint16).reshape(-1)
                positions = blocks * (m * d)
                # scored where they lie
                if self._codec.name == "bf16":
                    words = memory[: len(memory) // 2 * 2].view(np.uint16)
                    positions = offsets[records] // 2
                else:
                    self._codec.scatter(
                        memory, (offsets[records], blocks), decoded, threads=1
                    )
                max_sim(words, positions, padded, scores, (m, d, vectors))
                self._out[out_indices[records]] = scores[: len(blocks)]
            _buffers.give_back(buffer)

        run_chunks(score, len(offsets), 2 * m * d, threads)

    def check(self, part: Part, threads: int | None = None) -> None:
        """Check the records `batch[part]`, which the engine has read into
        `records`. Raises the errors of `take`.
        """
        addresses = self._addresses(part)
        size = self._codec.record_bytes
        run_chunks(
            _memory_check(addresses, size, self._check[part]),
            len(addresses),
            size,
            threads,
        )

    def _addresses(self, part: Part) -> Ints:
        assert self.records is not None
        addresses: Ints = (
            self.records.ctypes.data
            + self.batch.out_indices[part] * self._codec.record_bytes
        )
        return addresses


def copy_blocks(out: NDArray[Any], originals: Ints, duplicates: Ints) -> None:
    """Write the blocks `out[originals]` to `out[duplicates]`. `out` is contiguous."""
    size = out[0].nbytes
    start = out.ctypes.data
    _copy(
        start + originals * size,
        start + duplicates * size,
        size,
        lambda *_: None,
        None,
        held=out,
    )


def _copy(
    sources: Ints,
    targets: Ints,
    size: int,
    compare: Callable[[NDArray[np.uint32], int, int], None],
    threads: int | None,
    held: object,
) -> None:
    """Copy `size` bytes from each address to another. Call `compare(checksums,
    start, stop)` after each part.
    """
    total = len(sources) * size
    is_aligned = size % _LINE_BYTES == 0 and not (targets % _LINE_BYTES).any()
    copies = COPY_NONTEMPORAL if total >= _NONTEMPORAL_FROM and is_aligned else COPY
    check_records = _loop(total)

    def work(start: int, stop: int, _held: object = held) -> None:
        actual = np.empty(stop, dtype=np.uint32)
        check_records(sources, targets, size, actual, copies, start, stop)
        compare(actual, start, stop)

    run_chunks(work, len(sources), size, threads)


def _memory_check(
    sources: Ints, size: int, check: BlockCheck
) -> Callable[[int, int], None]:
    """Return a function `(start, stop)` that checks the records at
    `sources[start:stop]` on the calling thread.
    """
    sources = np.ascontiguousarray(sources)
    check_records = _loop(len(sources) * size)
    actual = np.empty(len(sources), dtype=np.uint32)

    def check_part(start: int, stop: int) -> None:
        check_records(sources, sources, size, actual, NO_COPY, start, stop)
        check.compare(actual, start, stop)

    return check_part


def checksums_at(sources: Ints, size: int) -> NDArray[np.uint32]:
    """Return the CRC-32C of the `size` bytes at each address in `sources` [k],
    uint32 [k].
    """
    sources = np.ascontiguousarray(sources)
    check_records = _loop(len(sources) * size)
    actual = np.empty(len(sources), dtype=np.uint32)
    run_chunks(
        functools.partial(check_records, sources, sources, size, actual, NO_COPY),
        len(sources),
        size,
        None,
    )
    return actual


_plainly_checked_bytes = 0


def _plain_loop(
    sources: Ints,
    targets: Ints,
    size: int,
    checksums: NDArray[np.uint32],
    copies: int,
    start: int,
    stop: int,
) -> None:
    """Do the work of `reading.loops.check_records` without Numba."""
    global _plainly_checked_bytes
    for index in range(start, stop):
        source = int(sources[index])
        if copies != NO_COPY:
            ctypes.memmove(int(targets[index]), source, size)
        checksums[index] = crc32c(memory_at(source, size))
    _plainly_checked_bytes += (stop - start) * size


@functools.cache
def _compiled_loop() -> Callable[..., None]:
    try:
        from storage_formats.reading import loops
    except ImportError:
        return _plain_loop
    return loops.check_records if loops.has_crc_instruction() else _plain_loop


def _loop(total: int) -> Callable[..., None]:
    """Return `reading.loops.check_records` if Numba is imported, or if `total`
    bytes make its import worthwhile.
    """
    # Importing Numba takes half a second.
    compiled = (
        "numba" in sys.modules
        or total >= _COMPILED_FROM
        or _plainly_checked_bytes > _COMPILED_AFTER
    )
    return _compiled_loop() if compiled else _plain_loop
