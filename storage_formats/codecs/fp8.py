"""`fp8`: E4M3 codes with a power-of-two scale a token.

Record of m tokens of width d: m x d bytes of E4M3 codes, tokens in order; then m bytes of E8M0 scales.
64 x 384: 24,576 + 64 = 24,640 bytes.

Code: bit 7 sign, bits 6-3 exponent (bias 7), bits 2-0 fraction; exponent 0 is subnormal; 0x7F and 0xFF are NaN;
no infinities; largest 448 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP OFP8 1.0). Scale:
2 ** (byte - 127), 0xFF is NaN (OCP MX 1.0, section 5.4.1). Number = code x scale, exact in bfloat16.

An encoder chooses the smallest scale with which the token's largest magnitude does not exceed 448 (the rule of
cuBLAS for MXFP8, over a token). So nothing saturates, and the relative error is that of plain E4M3 at its best
whatever the tokens' magnitude; plain E4M3 loses tokens whose numbers are much below 2 ** -6 or above 448.

NumPy alone decodes the values of the Zarr array:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("fp8")
>>> values = np.concatenate([entry.encode(blocks), fill_record(entry)])  # as a reader gives them; row 2 is a hole
>>> byte = np.arange(256)
>>> e4m3 = np.where(byte & 120, np.ldexp(8.0 + byte % 8, byte // 8 % 16 - 10), np.ldexp(byte % 8, -9))
>>> e4m3 = np.where(byte % 128 == 127, np.nan, e4m3) * np.where(byte < 128, 1, -1)
>>> e8m0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
>>> tokens = e4m3[values[:, :24576]].reshape(-1, 64, 384) * e8m0[values[:, 24576:]][..., None]
>>> np.array_equal(tokens.reshape(-1, 64, 384), entry.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E4M3, e8m0_codes, e8m0_values


class FP8Codec(GroupScaledCodec):
    """E4M3 with an E8M0 scale a token."""

    name = "fp8"
    logical_dtype = "float8_e4m3fn"
    element = E4M3
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=block_shape[1])

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The smallest 2 ** e with largest / 2 ** e <= 448."""
        fraction, exponent = np.frexp(largest.astype(np.float64) / E4M3.largest)  # fraction in [0.5, 1)
        return e8m0_codes(np.where(largest > 0, exponent - (fraction == 0.5), -127))
