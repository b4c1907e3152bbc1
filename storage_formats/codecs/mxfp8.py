"""`mxfp8`: MXFP8 with E4M3 elements (OCP Microscaling Formats (MX) Specification 1.0, 2023).

Record of m tokens of width d: m x d bytes of E4M3 codes (as in `fp8`), tokens in order; then m x d / 32 bytes of
E8M0 scales, one for every 32 consecutive numbers of a token. 64 x 384: 24,576 + 768 = 25,344 bytes. d must be a
multiple of 32. Number = code x scale.

An encoder follows section 6.3: the scale is the largest power of two that does not exceed the group's largest
magnitude, divided by that of the element type, 2 ** 8; quotients beyond 448 saturate.

NumPy alone decodes the values of the Zarr array:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("mxfp8")
>>> values = np.concatenate([entry.encode(blocks), fill_record(entry)])  # as a reader gives them; row 2 is a hole
>>> byte = np.arange(256)
>>> e4m3 = np.where(byte & 120, np.ldexp(8.0 + byte % 8, byte // 8 % 16 - 10), np.ldexp(byte % 8, -9))
>>> e4m3 = np.where(byte % 128 == 127, np.nan, e4m3) * np.where(byte < 128, 1, -1)
>>> e8m0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
>>> tokens = e4m3[values[:, :24576]].reshape(-1, 768, 32) * e8m0[values[:, 24576:]][..., None]
>>> np.array_equal(tokens.reshape(-1, 64, 384), entry.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E4M3, e8m0_values, mx_scale_codes


class MXFP8Codec(GroupScaledCodec):
    """E4M3 with an E8M0 scale for 32 numbers."""

    name = "mxfp8"
    logical_dtype = "mxfp8_e4m3"
    element = E4M3
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=32)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """OCP MX 1.0, section 6.3; the largest power of two of E4M3 is 2 ** 8."""
        return mx_scale_codes(largest, 8)
