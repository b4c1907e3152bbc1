"""`mxfp4`: MXFP4 (OCP Microscaling Formats (MX) Specification 1.0, 2023).

A record contains, for m tokens of width d, where d is a multiple of 32:

- m x d / 2 bytes of E2M1 codes, tokens in order, two codes per byte with the first in the low half
- m x d / 32 E8M0 scales of one byte, one per group of 32 consecutive values of a token

An E2M1 code has the sign in bit 3, the exponent (bias 1) in bits 2-1 and the fraction in bit 0. Its magnitudes are 0,
0.5, 1, 1.5, 2, 3, 4 and 6. A scale is 2 ** (byte - 127), and the byte 0xFF is NaN. A decoded value is code x scale.

The scale of a group is the largest power of two that does not exceed the largest magnitude of the group / 4 (section
6.3). Magnitudes above 6 x scale are stored as 6 x scale. This example decodes the Zarr array with NumPy alone:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> mxfp4 = codec("mxfp4")
>>> values = np.concatenate([mxfp4.encode(blocks), fill_record(mxfp4)])  # as Zarr readers return them; row 2: a hole
>>> e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
>>> codes = np.stack([values[:, :12288] & 15, values[:, :12288] >> 4], axis=-1)
>>> e8m0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
>>> tokens = e2m1[codes].reshape(-1, 768, 32) * e8m0[values[:, 12288:]][..., None]
>>> np.array_equal(tokens.reshape(-1, 64, 384), mxfp4.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E2M1, e8m0_values, mx_scale_codes


class MXFP4Codec(GroupScaledCodec):
    """Stores E2M1 codes with one E8M0 scale per 32 values. See `storage_formats.codecs.base.Codec`."""

    name = "mxfp4"
    logical_dtype = "mxfp4_e2m1"
    element = E2M1
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=32)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        return mx_scale_codes(largest, 2)
