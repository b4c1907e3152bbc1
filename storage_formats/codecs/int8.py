"""`int8`: integers with a scale a token.

Record of m tokens of width d: m x d bytes of two's complement integers, tokens in order; then m scales, bfloat16,
little endian. 64 x 384: 24,576 + 128 = 24,704 bytes. Number = integer x scale, rounded once to bfloat16.

An encoder takes the scale nearest to the token's largest magnitude / 127 and rounds number / scale to the nearest
integer, ties to even, saturated at -127 and 127 (the symmetric scheme of Jacob et al., "Quantization and Training
of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018). The scale is at least the smallest
bfloat16, 2 ** -133, and at most 2 ** 121, with which 127 still gives a bfloat16. A bfloat16 scale makes the product
exact in float32; on tokens of DINOv2 a float32 scale has the same error, 0.0076.

NumPy alone decodes the values of the Zarr array; the upper half of a float32 is a bfloat16:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("int8")
>>> values = np.concatenate([entry.encode(blocks), fill_record(entry)])  # as a reader gives them; row 2 is a hole
>>> integers, scales = values[:, :24576].view(np.int8), values[:, 24576:].copy().view("<u2")
>>> scales = (scales.astype(np.uint32) << 16).view(np.float32)
>>> tokens = integers.reshape(-1, 64, 384) * scales[..., None]  # float32, before the rounding to bfloat16
>>> np.array_equal(tokens.astype(ml_dtypes.bfloat16), entry.decode(values), equal_nan=True)
True
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16
from storage_formats.codecs.compiled import Bits, Bytes, CompiledCodec, Moves

NAN_SCALE = 0xFFFF
"""Bits of the scale of a token that is not finite: the fill byte repeated."""


class Int8Codec(CompiledCodec):
    """Eight-bit integers with a bfloat16 scale a token."""

    name = "int8"
    logical_dtype = "int8"

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, block_shape[0] * (block_shape[1] + 2))

    @staticmethod
    def scales(largest: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale of a token by its largest magnitude, which is finite."""
        return np.clip((largest / 127).astype(BF16).astype(np.float32), 2.0**-133, 2.0**121)

    def _encode(self, bits: Bits, records: Bytes, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        kernels.encode_int8(bits, _scale_table(), records, self._shape, start, stop)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        kernels.decode_int8(records, *moves, bits, self._shape, start, stop)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (self.values, self.block_shape[1], self.block_shape[1])


@functools.cache
def _scale_table() -> NDArray[np.uint16]:
    """Bits of the scale by bits of a token's largest magnitude, uint16 [32768]; NaN for what is not finite."""
    magnitudes = np.arange(0x8000, dtype=np.uint16).view(BF16).astype(np.float32)
    finite = np.isfinite(magnitudes)
    table = np.full(len(magnitudes), NAN_SCALE, dtype=np.uint16)
    table[finite] = Int8Codec.scales(magnitudes[finite]).astype(BF16).view(np.uint16)
    return table
