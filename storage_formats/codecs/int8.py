"""`int8`: integers with one scale per token.

A record contains, for m tokens of width d:

- m x d two's complement integers of one byte, tokens in order
- m bfloat16 scales, little endian

A decoded value is integer x scale, rounded to bfloat16. The scale is the largest magnitude of the token divided by 127,
rounded to bfloat16 and limited to 2 ** -133 to 2 ** 121. The encoder rounds value / scale to the nearest integer, ties
to even, and limits the integer to -127 to 127. This is the symmetric scheme of Jacob et al., 2018.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16, Bits, Bytes, Codec, Moves, Span

NAN_SCALE = 0xFFFF
"""Bits of the scale of a token that contains NaN or infinity. Both bytes equal the fill value."""


class Int8Codec(Codec):
    """Stores eight-bit integers with one bfloat16 scale per token. See `storage_formats.codecs.base.Codec`."""

    name = "int8"
    logical_dtype = "int8"

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, block_shape[0] * (block_shape[1] + 2))

    @staticmethod
    def scales(largest: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scale of each token, float32, with the shape of `largest`.

        Args:
            largest: largest magnitude of each token, float32, finite.
        """
        return np.clip((largest / 127).astype(BF16).astype(np.float32), 2.0**-133, 2.0**121)

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        from storage_formats.codecs import kernels

        kernels.encode_int8(bits, _scale_table(), records, self._geometry, span)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        from storage_formats.codecs import kernels

        kernels.decode_int8(records, moves, bits, self._geometry, span)

    @property
    def _geometry(self) -> tuple[int, int, int]:
        return (self.values, self.block_shape[1], self.block_shape[1])


@functools.cache
def _scale_table() -> NDArray[np.uint16]:
    """Return the bits of the scale, uint16 [32768], indexed by the bits of the largest magnitude of a token."""
    magnitudes = np.arange(0x8000, dtype=np.uint16).view(BF16).astype(np.float32)
    finite = np.isfinite(magnitudes)
    table = np.full(len(magnitudes), NAN_SCALE, dtype=np.uint16)
    table[finite] = Int8Codec.scales(magnitudes[finite]).astype(BF16).view(np.uint16)
    return table
