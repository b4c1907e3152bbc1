"""The base class of codecs with compiled kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import (
    Blocks,
    Check,
    Indices,
    Records,
    check_blocks,
    check_contiguous_records,
    check_indices,
    check_moves,
    check_out,
    check_records,
)
from storage_formats.codecs.minifloat import NAN_CODE
from storage_formats.threads import run_chunks

Bits: TypeAlias = NDArray[np.uint16]
"""Bits of bfloat16 values, flat."""
Bytes: TypeAlias = NDArray[np.uint8]
"""Bytes of records, flat."""
Moves: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(offsets, blocks): the record at byte `offsets[i]` is decoded to block `blocks[i]`. Both are int64 [k]."""
Span: TypeAlias = tuple[int, int]
"""(start, stop), a half-open range of items."""


class CompiledCodec(ABC):
    """Base class of codecs with compiled kernels. Checks the arguments and splits the work between threads.

    A subclass imports Numba at the first conversion.
    """

    name: str
    logical_dtype: str
    zarr_dtype = "uint8"
    fill_value = NAN_CODE

    def __init__(self, block_shape: tuple[int, int], record_bytes: int) -> None:
        self.block_shape = block_shape
        self.values = block_shape[0] * block_shape[1]
        self.record_bytes = record_bytes
        self.record_shape: tuple[int, ...] = (record_bytes,)

    @abstractmethod
    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        """Encode the blocks with the indices `range(*span)`."""

    @abstractmethod
    def _decode(self, records: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        """Decode the items of `moves` with the indices `range(*span)`."""

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        blocks = check_blocks(blocks, self.block_shape)
        records = np.empty((len(blocks), self.record_bytes), dtype=np.uint8)
        bits, flat = blocks.view(np.uint16).reshape(-1), records.reshape(-1)

        def encode(start: int, stop: int) -> None:
            self._encode(bits, flat, (start, stop))

        run_chunks(encode, len(blocks), 2 * self.values, threads)
        return records

    def decode(self, records: Records, out: Blocks | None = None, threads: int | None = None) -> Blocks:
        records = check_records(records, self.record_bytes)
        return self.decode_rows(records, np.arange(len(records)), out, threads)

    def decode_rows(
        self, records: Records, rows: Indices, out: Blocks | None = None, threads: int | None = None
    ) -> Blocks:
        indices = check_indices(rows, len(records))
        out = check_out(out, len(indices), self.block_shape)
        flat = check_contiguous_records(records, self.record_bytes).reshape(-1)
        self._convert(flat, (indices * self.record_bytes, np.arange(len(indices))), out, threads)
        return out

    def scatter(
        self,
        memory: Bytes,
        offsets: Indices,
        out: Blocks,
        indices: Indices,
        threads: int | None = None,
        check: Check | None = None,
    ) -> None:
        moves = check_moves(memory, self.record_bytes, offsets, len(out), indices)
        self._convert(memory, moves, check_out(out, len(out), self.block_shape), threads, check=check)

    def _convert(
        self, memory: Bytes, moves: Moves, out: Blocks, threads: int | None, *, check: Check | None = None
    ) -> None:
        bits = out.view(np.uint16).reshape(-1)

        def decode(start: int, stop: int) -> None:
            if check is not None:
                check(start, stop)
            self._decode(memory, moves, bits, (start, stop))

        run_chunks(decode, len(moves[0]), 2 * self.values, threads)
