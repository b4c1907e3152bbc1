"""`fp16`: IEEE 754 binary16, without a scale.

A record contains m x d binary16 values of two bytes, little endian, tokens in order.

- Magnitudes from 2 ** -14 to 65,504 are stored exactly.
- Smaller magnitudes are rounded to a multiple of 2 ** -24, ties to even.
- Larger finite magnitudes are stored as 65,504.
- NaN and infinity are stored as the NaN 0x7E00.

Decoding rounds each value to the nearest bfloat16, ties to even.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16, Bits, Bytes, Codec, Moves, Span
from storage_formats.codecs.minifloat import CANONICAL_NAN

_LARGEST = 65504.0


class FP16Codec(Codec):
    """Stores values as IEEE 754 binary16, without a scale. See `storage_formats.codecs.base.Codec`."""

    name = "fp16"
    logical_dtype = "float16"
    zarr_dtype = "uint16"
    fill_value = 0x7E00

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, 2 * block_shape[0] * block_shape[1])
        self.record_shape = block_shape

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        from storage_formats.codecs import kernels

        blocks = np.arange(*span)
        moves = (blocks * self.record_bytes, blocks)
        words = records.view(np.uint16)
        kernels.translate(bits.view(np.uint8), moves, _from_bf16(), words, self.values, (0, len(blocks)))

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        from storage_formats.codecs import kernels

        kernels.translate(records, moves, _to_bf16(), bits, self.values, span)


@functools.cache
def _from_bf16() -> NDArray[np.uint16]:
    """Return the binary16 bits of each bfloat16 value, uint16 [65536], indexed by the bits of the bfloat16 value."""
    numbers = np.arange(0x10000, dtype=np.uint16).view(BF16).astype(np.float32)
    nearest = np.clip(numbers, -_LARGEST, _LARGEST).astype(np.float16).view(np.uint16)
    return np.where(np.isfinite(numbers), nearest, np.uint16(FP16Codec.fill_value))


@functools.cache
def _to_bf16() -> NDArray[np.uint16]:
    """Return the bfloat16 bits of each binary16 value, uint16 [65536], indexed by the bits of the binary16 value."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        nearest = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32).astype(BF16)
    return np.where(np.isnan(nearest), np.uint16(CANONICAL_NAN), nearest.view(np.uint16))
