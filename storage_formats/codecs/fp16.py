"""`fp16`: IEEE 754 binary16, without a scale.

Record: m x d binary16, little endian, tokens in order; 2 m d bytes (64 x 384: 49,152, 12 pages as bf16). Sign 1,
exponent 5 (bias 15), fraction 10.

From bfloat16 the values of magnitude 2 ** -14 to 65,504 are kept exactly; smaller ones are rounded to nearest even
at a step of 2 ** -24, larger ones saturate at 65,504. What is not finite becomes the NaN 0x7E00. Decoding rounds to
nearest even; infinities, which no encoder writes, stay infinite.

NumPy alone decodes the values of the Zarr array:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("fp16")
>>> records = np.concatenate([entry.encode(blocks), fill_record(entry)])  # row 2 is a hole
>>> values = records.view("<u2").reshape(-1, 64, 384)  # as a reader gives them: uint16 [rows, 64, 384]
>>> tokens = values.view(np.float16)
>>> np.array_equal(tokens, entry.decode(records).astype(np.float16), equal_nan=True)
True
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16
from storage_formats.codecs.compiled import Bits, Bytes, CompiledCodec, Moves
from storage_formats.codecs.minifloat import CANONICAL_NAN

_LARGEST = 65504.0


class FP16Codec(CompiledCodec):
    """IEEE 754 binary16."""

    name = "fp16"
    logical_dtype = "float16"
    zarr_dtype = "uint16"
    fill_value = 0x7E00

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, 2 * block_shape[0] * block_shape[1])
        self.record_shape = block_shape

    def _encode(self, bits: Bits, records: Bytes, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        places = np.arange(start, stop)
        words = records.view(np.uint16)
        kernels.translate(
            bits.view(np.uint8), places * self.record_bytes, places, _from_bf16(), words, self.values, 0, len(places)
        )

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        kernels.translate(records, *moves, _to_bf16(), bits, self.values, start, stop)


@functools.cache
def _from_bf16() -> NDArray[np.uint16]:
    """binary16 bits by bfloat16 bits, uint16 [65536]."""
    numbers = np.arange(0x10000, dtype=np.uint16).view(BF16).astype(np.float32)
    nearest = np.clip(numbers, -_LARGEST, _LARGEST).astype(np.float16).view(np.uint16)
    return np.where(np.isfinite(numbers), nearest, np.uint16(FP16Codec.fill_value))


@functools.cache
def _to_bf16() -> NDArray[np.uint16]:
    """bfloat16 bits by binary16 bits, uint16 [65536]."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        nearest = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32).astype(BF16)
    return np.where(np.isnan(nearest), np.uint16(CANONICAL_NAN), nearest.view(np.uint16))
