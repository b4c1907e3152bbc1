"""`sign1`: the sign of each number, with a scale a token.

Record of m tokens of width d: m x d / 8 bytes of sign bits, tokens in order, eight a byte with the first in the
lowest bit, 1 for negative (-0 included); then m scales, bfloat16, little endian. 64 x 384: 3,072 + 128 = 3,200 bytes.
d must be a multiple of 8. Number = +scale or -scale; no product is formed, a scale of NaN makes the token NaN.

An encoder stores as scale the mean magnitude of the token, which minimises the squared error of signs with one scale
(Rastegari et al., "XNOR-Net", 2016, section 3.1): summed in float64 from the first number to the last, divided,
rounded to float32 and to bfloat16.

NumPy alone decodes the values of the Zarr array; the upper half of a float32 is a bfloat16:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("sign1")
>>> values = np.concatenate([entry.encode(blocks), fill_record(entry)])  # as a reader gives them; row 2 is a hole
>>> signs = np.unpackbits(values[:, :3072], axis=1, bitorder="little").reshape(-1, 64, 384)
>>> scales = (values[:, 3072:].copy().view("<u2").astype(np.uint32) << 16).view(np.float32)
>>> tokens = np.where(signs, -1, 1) * scales[..., None]
>>> np.array_equal(tokens, entry.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.compiled import Bits, Bytes, CompiledCodec, Moves
from storage_formats.errors import UsageError


class Sign1Codec(CompiledCodec):
    """Sign bits with a bfloat16 scale a token."""

    name = "sign1"
    logical_dtype = "sign1"

    def __init__(self, block_shape: tuple[int, int]) -> None:
        m, d = block_shape
        if d % 8:
            raise UsageError(
                f"sign1 packs 8 numbers of a token in a byte and {d} (blocks of {m} x {d}) is no multiple of 8; "
                "use fp8 or int8, which take any width"
            )
        super().__init__(block_shape, m * (d // 8 + 2))

    def _encode(self, bits: Bits, records: Bytes, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        kernels.encode_sign1(bits, records, self._shape, start, stop)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        kernels.decode_sign1(records, *moves, _sign_words(), bits.view(np.uint64), self._shape, start, stop)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (self.values, self.block_shape[1], self.block_shape[1])


@functools.cache
def _sign_words() -> NDArray[np.uint64]:
    """Sign bits of the 8 numbers of each byte, at their places in two words of four bfloat16, uint64 [512]."""
    signs = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return (signs.astype(np.uint16) << np.uint16(15)).view(np.uint64).reshape(-1)
