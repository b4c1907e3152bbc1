"""`sign1`: the sign of each value, with one scale per token.

A record contains, for m tokens of width d, where d is a multiple of 8:

- m x d / 8 bytes of sign bits, tokens in order; the lowest bit of a byte comes first, and 1 means negative
- m bfloat16 scales, little endian

A decoded value is +scale or -scale. The scale is the mean magnitude of the token, which minimises the squared error
(Rastegari et al., "XNOR-Net", 2016, section 3.1). The encoder sums the magnitudes in float64 from the first value to
the last, divides the sum by d, and rounds the quotient to float32 and then to bfloat16.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import Bits, Bytes, Codec, Moves, Span
from storage_formats.errors import UsageError


class Sign1Codec(Codec):
    """Stores sign bits with one bfloat16 scale per token. See `storage_formats.codecs.base.Codec`."""

    name = "sign1"
    logical_dtype = "sign1"

    def __init__(self, block_shape: tuple[int, int]) -> None:
        m, d = block_shape
        if d % 8:
            raise UsageError(
                f"precision 'sign1' needs tokens whose width is a multiple of 8, but the width is {d}; use "
                "fp8 or int8, which accept any width"
            )
        super().__init__(block_shape, m * (d // 8 + 2))

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        from storage_formats.codecs import kernels

        kernels.encode_sign1(bits, records, self._geometry, span)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        from storage_formats.codecs import kernels

        kernels.decode_sign1(records, moves, _sign_words(), bits.view(np.uint64), self._geometry, span)

    @property
    def _geometry(self) -> tuple[int, int, int]:
        return (self.values, self.block_shape[1], self.block_shape[1])


@functools.cache
def _sign_words() -> NDArray[np.uint64]:
    """Return a table of two words for each byte of eight sign bits, uint64 [512].

    A word consists of four bfloat16 values with only the sign bits set.
    """
    signs = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return (signs.astype(np.uint16) << np.uint16(15)).view(np.uint64).reshape(-1)
