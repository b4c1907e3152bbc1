"""What the compiled codecs share: checks, flat views and threads around a pair of kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import (
    Blocks,
    Records,
    Rows,
    check_blocks,
    check_gathered,
    check_moves,
    check_out,
    check_records,
    check_rows,
)
from storage_formats.codecs.minifloat import NAN_CODE
from storage_formats.codecs.threads import run_chunks

Bits = NDArray[np.uint16]
"""Flat bits of bfloat16 numbers."""
Bytes = NDArray[np.uint8]
"""Flat bytes of records."""
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(starts, places): the record from byte `starts[i]` on becomes block `places[i]`."""


class CompiledCodec(ABC):
    """A precision whose records are bytes: codes of all tokens first, then their scales. See `base.Codec`.

    The methods of a subclass import `storage_formats.codecs.kernels`, and with it Numba, when they are called.
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
    def _encode(self, bits: Bits, records: Bytes, start: int, stop: int) -> None:
        """Encode blocks [start, stop)."""

    @abstractmethod
    def _decode(self, records: Bytes, moves: Moves, bits: Bits, start: int, stop: int) -> None:
        """Decode the records at bytes `starts[start:stop]` to blocks `places[start:stop]`."""

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        """bf16 [k, m, d] -> uint8 [k, record_bytes]."""
        blocks = check_blocks(blocks, self.block_shape)
        records = np.empty((len(blocks), self.record_bytes), dtype=np.uint8)
        bits, flat = blocks.view(np.uint16).reshape(-1), records.reshape(-1)
        run_chunks(lambda start, stop: self._encode(bits, flat, start, stop), len(blocks), 2 * self.values, threads)
        return records

    def decode(self, records: Records, out: Blocks | None = None, threads: int | None = None) -> Blocks:
        """uint8 [k, record_bytes] -> bf16 [k, m, d], into `out` where it is given."""
        records = check_records(records, self.record_bytes)
        return self.decode_rows(records, np.arange(len(records)), out, threads)

    def decode_rows(
        self, records: Records, rows: Rows, out: Blocks | None = None, threads: int | None = None
    ) -> Blocks:
        """`records[rows]` as bf16 [k, m, d], into `out` where it is given; see `base.Codec`."""
        checked = check_rows(rows, len(records))
        out = check_out(out, len(checked), self.block_shape)
        flat = check_gathered(records, self.record_bytes).reshape(-1)
        self._convert(flat, (checked * self.record_bytes, np.arange(len(checked))), out, threads)
        return out

    def scatter(self, memory: Bytes, starts: Rows, out: Blocks, places: Rows, threads: int | None = None) -> None:
        """The record from byte `starts[i]` of `memory` on as block `out[places[i]]`; see `base.Codec`."""
        moves = check_moves(memory, self.record_bytes, starts, len(out), places)
        self._convert(memory, moves, check_out(out, len(out), self.block_shape), threads)

    def _convert(self, memory: Bytes, moves: Moves, out: Blocks, threads: int | None) -> None:
        bits = out.view(np.uint16).reshape(-1)
        run_chunks(
            lambda start, stop: self._decode(memory, moves, bits, start, stop), len(moves[0]), 2 * self.values, threads
        )
