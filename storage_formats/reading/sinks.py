"""What is done with records that were read: they are copied, decoded or scored.

A sink has the output array of one fetch. Its method `write` takes the memory address of
each record and the index of the record in the output. It works on the calling thread.
The number of threads is chosen from `block_bytes`, the number of bytes that writing a
record handles. If `records`, uint8 [k, record_bytes], is not None, it is the output,
and an engine may read records directly into it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Blocks, Codec, Records
from storage_formats.reading.batch import Ints
from storage_formats.reading.memory import ADDRESS_SPACE, lend, offset_of
from storage_formats.reading.records import copy_records

_BYPASS_FROM = 32 << 20
"""Size in bytes from which on an output is written with non-temporal stores, which
bypass the processor's cache. They make copies of 480 MB twice as fast
(docs/lab/storage-io.md). A smaller output fits into the cache, from which the caller
then reads it.
"""


@dataclass(frozen=True)
class RecordSink:
    """Copies records to `records`, uint8 [k, record_bytes], C-contiguous."""

    records: Records

    @property
    def block_bytes(self) -> int:
        return int(self.records.shape[1])

    def write(self, sources: Ints, out_indices: Ints) -> None:
        bypasses = self.records.nbytes >= _BYPASS_FROM
        copy_records(sources, self.records, out_indices, bypasses=bypasses)


@dataclass(frozen=True)
class BlockSink:
    """Decodes records to `blocks`, bfloat16 [k, m, d], C-contiguous."""

    codec: Codec
    blocks: Blocks
    records: None = None

    @property
    def block_bytes(self) -> int:
        return 2 * self.codec.values

    def write(self, sources: Ints, out_indices: Ints) -> None:
        bits = self.blocks.view(np.uint16).reshape(-1)
        moves = (offset_of(sources), out_indices)
        self.codec.decode_at(ADDRESS_SPACE, moves, bits)


@dataclass(frozen=True)
class ScoreSink:
    """Writes the MaxSim of a query and each block to `scores`, float32 [k].

    Attributes:
        query: query vectors, float32 [q, d].
    """

    codec: Codec
    query: NDArray[np.float32]
    scores: NDArray[np.float32]
    records: None = None

    @property
    def block_bytes(self) -> int:
        return 2 * self.codec.values

    def write(self, sources: Ints, out_indices: Ints) -> None:
        from storage_formats.codecs.kernels import max_sim

        m, d = self.codec.block_shape
        count = len(sources)
        # a bf16 record is the block, so it is scored where it lies
        words = ADDRESS_SPACE.view(np.uint16)
        starts = offset_of(sources) // 2
        if self.codec.has_offset:
            words = lend(count * 2 * m * d).view(np.uint16)
            order = np.arange(count)
            starts = order * (m * d)
            moves = (offset_of(sources), order)
            self.codec.decode_at(ADDRESS_SPACE, moves, words)
        scores = np.empty(count, np.float32)
        max_sim(words, starts, self._padded_query, scores, (m, d, len(self.query)))
        self.scores[out_indices] = scores

    @functools.cached_property
    def _padded_query(self) -> NDArray[np.float32]:
        """The query with zero vectors up to a multiple of four vectors, flattened."""
        # `np.pad` would take longer than the whole call for one row
        count, width = self.query.shape
        padded = np.zeros((count + -count % 4, width), dtype=np.float32)
        padded[:count] = self.query
        return padded.reshape(-1)


Sink: TypeAlias = RecordSink | BlockSink | ScoreSink
