"""`fp8`: E4M3 codes with one power-of-two scale per token.

A record contains, for m tokens of width d:

- m x d E4M3 codes of one byte, tokens in order
- m E8M0 scales of one byte

An E4M3 code has the sign in bit 7, the exponent (bias 7) in bits 6-3 and the fraction in bits 2-0. Exponent 0 is
subnormal. 0x7F and 0xFF are NaN (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). An E8M0 scale is 2 **
(byte - 127), and the byte 0xFF is NaN (OCP MX 1.0, section 5.4.1). A decoded value is code x scale.

The encoder takes the smallest scale with which no code exceeds 448. This example decodes the Zarr array with NumPy
alone:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> fp8 = codec("fp8")
>>> values = np.concatenate([fp8.encode(blocks), fill_record(fp8)])  # as Zarr readers return them; row 2: a hole
>>> byte = np.arange(256)
>>> e4m3 = np.where(byte & 120, np.ldexp(8.0 + byte % 8, byte // 8 % 16 - 10), np.ldexp(byte % 8, -9))
>>> e4m3 = np.where(byte % 128 == 127, np.nan, e4m3) * np.where(byte < 128, 1, -1)
>>> e8m0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
>>> tokens = e4m3[values[:, :24576]].reshape(-1, 64, 384) * e8m0[values[:, 24576:]][..., None]
>>> np.array_equal(tokens.reshape(-1, 64, 384), fp8.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E4M3, e8m0_codes, e8m0_values


class FP8Codec(GroupScaledCodec):
    """Stores E4M3 codes with one E8M0 scale per token. See `storage_formats.codecs.base.Codec`."""

    name = "fp8"
    logical_dtype = "float8_e4m3fn"
    element = E4M3
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=block_shape[1])

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        fraction, exponent = np.frexp(largest.astype(np.float64) / E4M3.largest)  # fraction in [0.5, 1)
        return e8m0_codes(np.where(largest > 0, exponent - (fraction == 0.5), -127))
