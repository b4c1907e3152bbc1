"""`bf16`: bfloat16 values, stored unchanged.

A record contains m x d bfloat16 values of two bytes, little endian, tokens in order. A bfloat16 is the upper half of an
IEEE 754 binary32: 1 sign bit, 8 exponent bits (bias 127), 7 fraction bits. All values are stored exactly, including
NaN.
"""

from __future__ import annotations

import numpy as np

from storage_formats.codecs.base import Bits, Blocks, Bytes, Codec, Moves, Records, Span


class BF16Codec(Codec):
    """Stores bfloat16 values unchanged. See `storage_formats.codecs.base.Codec`."""

    name = "bf16"
    logical_dtype = "bfloat16"
    zarr_dtype = "uint16"
    fill_value = 0x7FC0

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, 2 * block_shape[0] * block_shape[1])
        self.record_shape = block_shape

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        self._check_blocks(blocks)
        return np.ascontiguousarray(blocks).view(np.uint8).reshape(len(blocks), self.record_bytes)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        start, stop = span
        copies = bits.view(np.uint8).reshape(-1, self.record_bytes)
        for offset, index in zip(moves[0][start:stop].tolist(), moves[1][start:stop].tolist(), strict=True):
            copies[index] = records[offset : offset + self.record_bytes]
