"""`mxfp8`: MXFP8 with E4M3 elements (OCP Microscaling Formats (MX) Specification 1.0, 2023).

A record contains, for m tokens of width d, where d is a multiple of 32:

- m x d E4M3 codes of one byte (see `fp8`), tokens in order
- m x d / 32 E8M0 scales of one byte, one per group of 32 consecutive values of a token

A decoded value is code x scale. The scale of a group is the largest power of two that does not exceed the largest
magnitude of the group / 256 (section 6.3). Magnitudes above 448 x scale are stored as 448 x scale. This example decodes
the Zarr array with NumPy alone:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> mxfp8 = codec("mxfp8")
>>> values = np.concatenate([mxfp8.encode(blocks), fill_record(mxfp8)])  # as Zarr readers return them; row 2: a hole
>>> byte = np.arange(256)
>>> e4m3 = np.where(byte & 120, np.ldexp(8.0 + byte % 8, byte // 8 % 16 - 10), np.ldexp(byte % 8, -9))
>>> e4m3 = np.where(byte % 128 == 127, np.nan, e4m3) * np.where(byte < 128, 1, -1)
>>> e8m0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
>>> tokens = e4m3[values[:, :24576]].reshape(-1, 768, 32) * e8m0[values[:, 24576:]][..., None]
>>> np.array_equal(tokens.reshape(-1, 64, 384), mxfp8.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E4M3, e8m0_values, mx_scale_codes


class MXFP8Codec(GroupScaledCodec):
    """Stores E4M3 codes with one E8M0 scale per 32 values. See `storage_formats.codecs.base.Codec`."""

    name = "mxfp8"
    logical_dtype = "mxfp8_e4m3"
    element = E4M3
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=32)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        return mx_scale_codes(largest, 8)
