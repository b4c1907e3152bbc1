"""The destination of the records that an engine reads. It compares the records with
their checksums, and writes the records, the decoded blocks or the scores of the blocks
to the caller's array.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Codec, Records
from storage_formats.codecs.base import Bits, Moves, Scorer, Span
from storage_formats.format.checksum import crc32c
from storage_formats.reading.batch import Batch, Ints, Part
from storage_formats.reading.checksums import BlockChecksums, Checksums
from storage_formats.reading.memory import BufferPool, Bytes
from storage_formats.threads import run_chunks

# The same values as in `reading.loops`. They are not imported from there, because that
# module imports Numba.
NO_COPY, COPY, COPY_NONTEMPORAL = range(3)
# A read of at least this number of bytes uses the compiled loop even if Numba must be
# imported first.
_COMPILED_FROM = 32 << 20
# After this process has checked this number of bytes without Numba, the compiled loop
# is always used. By then, about as much time has been lost as the import of Numba
# takes.
_COMPILED_AFTER = 4 << 30
# size of a line of the processor's cache
_LINE_BYTES = 64
# Number of records that are scored at a time. So few records stay in the processor's
# cache from the check to the decoding and the dot products.
_SCORED_RECORDS = 32
_NONTEMPORAL_FROM = 32 << 20
"""Size in bytes from which on an output is written with non-temporal stores, which
bypass the processor's cache. They make copies of 480 MB twice as fast
(docs/lab/storage-io.md). A smaller output fits into the cache, from which the caller
then reads it.
"""


_buffers = BufferPool()


@dataclass(frozen=True)
class Destination:
    """Receives the records of a batch, compares them with their checksums, and writes
    them to `out`: unchanged, decoded or as scores.

    An engine reads records into a buffer and passes the buffer to `take`. If `records`
    is not None, the engine may instead read record i of the batch directly into
    `records[batch.out_indices[i]]`, and then pass `records` to `take`.

    Attributes:
        out: array for the blocks, bfloat16 [k, m, d], or for the records, uint8 [k,
            record_bytes], or for the scores, float32 [k].
        query: query vectors [q, d] if `out` receives the MaxSim of the query and each
            block.
        always_checks: whether records of a memory map are compared with their
            checksums although this process has compared them before.
    """

    batch: Batch
    out: NDArray[Any]
    codec: Codec
    checksums: BlockChecksums
    query: NDArray[np.float32] | None = None
    always_checks: bool = False

    @functools.cached_property
    def records(self) -> Records | None:
        """`out` as an array of records, uint8 [k, record_bytes]; None if `out` receives
        decoded blocks or scores.
        """
        if self.query is None and (
            self.out.dtype == np.uint8 or self.codec.name == "bf16"
        ):
            return self.out.view(np.uint8).reshape(-1, self.codec.record_bytes)
        return None

    @functools.cached_property
    def _bits(self) -> Bits:
        return self.out.view(np.uint16).reshape(-1)

    # Loading the checksums may read files. It must not delay the first requests for
    # records, so it happens in the first call of `take`.
    @functools.cached_property
    def _expected(self) -> Checksums:
        return self.checksums.expected(self.batch)

    @functools.cached_property
    def _scorer(self) -> Scorer | None:
        return None if self.query is None else self.codec.scorer(self.query)

    @functools.cached_property
    def _padded_query(self) -> NDArray[np.float32]:
        """The query with zero vectors up to a multiple of four vectors, flattened."""
        assert self.query is not None
        padding = -len(self.query) % 4
        return np.pad(self.query, ((0, padding), (0, 0))).reshape(-1)

    def take(
        self,
        memory: Bytes,
        offsets: Ints,
        part: Part,
        threads: int | None = None,
        *,
        checks: bool = True,
    ) -> None:
        """Compare the records `batch[part]` with their checksums, and write them to
        `out`.

        Args:
            memory: memory that contains the records.
            offsets: byte offset of each record in `memory`, int64 [k].
            threads: maximum number of threads, see `run_chunks`.
            checks: whether to compare checksums.

        Raises:
            CorruptIndexError: a record does not match its checksum.
        """
        size = self.codec.record_bytes
        m, d = self.codec.block_shape
        batch = self.batch[part]
        expected = self._expected[part] if checks else None
        sources = memory.ctypes.data + offsets
        if self.records is None:
            # `copy_and_sum` copies nothing, because `_decode` writes the output
            targets = None
            block_bytes = 2 * m * d
        elif memory.ctypes.data == self.records.ctypes.data:
            # the engine has read the records into the output
            targets = None
            block_bytes = size
        else:
            targets = self.records.ctypes.data + batch.out_indices * size
            block_bytes = size
        records = _Records(sources, size, targets, checks)
        moves = (offsets, batch.out_indices)

        # If an exception interrupts the calling thread, a helper thread may still use
        # `memory` and `self.out`. The helper thread holds this function, which refers
        # to both, so that they stay allocated.
        def work(start: int, stop: int) -> None:
            step = stop - start if self.query is None else _SCORED_RECORDS
            for first in range(start, stop, step):
                last = min(first + step, stop)
                if checks or targets is not None:
                    actual = records.copy_and_sum(first, last)
                if expected is not None and (
                    actual.tobytes() != expected[first:last].tobytes()
                ):
                    damaged = actual != expected[first:last]
                    raise self.checksums.damaged(batch[first:last][damaged])
                if self.records is None:
                    self._decode(memory, moves, (first, last))

        run_chunks(work, len(offsets), block_bytes, threads)

    def _decode(self, memory: Bytes, moves: Moves, span: Span) -> None:
        """Decode or score the items of `moves` with the indices `range(*span)`. Their
        records are in `memory`.
        """
        if self.query is None:
            self.codec.decode_at(memory, moves, self._bits, span)
            return
        offsets, blocks = (each[slice(*span)] for each in moves)
        scores = np.empty(len(blocks), np.float32)
        if self._scorer is not None:
            self._scorer(memory, offsets, scores)
            self.out[blocks] = scores
            return
        from storage_formats.codecs.kernels import max_sim

        m, d = self.codec.block_shape
        shape = (m, d, len(self.query))
        if self.codec.name == "bf16":
            # a bf16 record is the block, so it is scored in `memory`
            words = memory[: len(memory) // 2 * 2].view(np.uint16)
            max_sim(words, offsets // 2, self._padded_query, scores, shape)
        else:
            buffer = _buffers.borrow(len(blocks) * 2 * m * d)
            words = buffer.view(np.uint16)
            order = np.arange(len(blocks))
            self.codec.decode_at(memory, (offsets, order), words, (0, len(blocks)))
            max_sim(words, order * (m * d), self._padded_query, scores, shape)
            _buffers.give_back(buffer)
        self.out[blocks] = scores


class _Records:
    """Records of `size` bytes at the memory addresses `sources` [k].

    Args:
        targets: memory addresses to which `copy_and_sum` copies the records, [k]; None
            to copy nothing.
        sums: whether `copy_and_sum` computes checksums.
    """

    def __init__(
        self,
        sources: Ints,
        size: int,
        targets: Ints | None = None,
        sums: bool = True,
    ) -> None:
        total = len(sources) * size
        self._sources = np.ascontiguousarray(sources)
        self._size = size
        self._targets = self._sources
        self._copies = NO_COPY
        self._loop = _loop(total)
        if targets is not None:
            is_aligned = not (targets % _LINE_BYTES).any()
            bypasses = total >= _NONTEMPORAL_FROM and is_aligned
            self._copies = COPY_NONTEMPORAL if bypasses else COPY
            self._targets = targets
            # the compiled loop can only copy whole lines
            if size % _LINE_BYTES:
                self._loop = _plain_loop
        self.checksums = np.empty(len(sources) if sums else 0, dtype=np.uint32)

    def copy_and_sum(self, start: int, stop: int) -> Checksums:
        """Copy the records [start, stop) on the calling thread, and return their
        CRC-32C, uint32 [stop - start].
        """
        self._loop(
            self._sources,
            self._targets,
            self._size,
            self.checksums,
            self._copies,
            start,
            stop,
        )
        return self.checksums[start:stop]


def checksums_at(sources: Ints, size: int) -> Checksums:
    """Return the CRC-32C of the `size` bytes at each address in `sources` [k],
    uint32 [k].
    """
    records = _Records(sources, size)
    run_chunks(records.copy_and_sum, len(sources), size, None)
    return records.checksums


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
    """Do the work of `reading.loops.copy_records` without Numba."""
    global _plainly_checked_bytes
    # `crc32c` gets the record as a ctypes array, because creating a NumPy array would
    # take as long as computing the checksum.
    record_type: Any = ctypes.c_char * size
    for index in range(start, stop):
        source = int(sources[index])
        if copies != NO_COPY:
            ctypes.memmove(int(targets[index]), source, size)
        if len(checksums):
            checksums[index] = crc32c(record_type.from_address(source))
    _plainly_checked_bytes += (stop - start) * size


@functools.cache
def _compiled_loop() -> Callable[..., None]:
    try:
        from storage_formats.reading import loops
    except ImportError:
        return _plain_loop
    return loops.copy_records if loops.has_crc_instruction() else _plain_loop


def _loop(total: int) -> Callable[..., None]:
    """Return the loop for a read of `total` bytes: `reading.loops.copy_records` if
    Numba is already imported, if the read is long, or if this process has checked many
    bytes without Numba. Otherwise return `_plain_loop`.
    """
    # importing Numba takes half a second
    compiled = (
        "numba" in sys.modules
        or total >= _COMPILED_FROM
        or _plainly_checked_bytes > _COMPILED_AFTER
    )
    return _compiled_loop() if compiled else _plain_loop
