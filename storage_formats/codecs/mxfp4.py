"""`mxfp4`: MXFP4 (OCP Microscaling Formats (MX) Specification 1.0, 2023).

Record of m tokens of width d: m x d / 2 bytes of E2M1 codes, tokens in order, two a byte with the first in the low
half; then m x d / 32 bytes of E8M0 scales, one for every 32 consecutive numbers of a token. 64 x 384:
12,288 + 768 = 13,056 bytes. d must be a multiple of 32.

Code (section 5.3.3): bit 3 sign, bits 2-1 exponent (bias 1), bit 0 fraction; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
Scale: 2 ** (byte - 127), 0xFF is NaN. Number = code x scale, exact in bfloat16.

An encoder follows section 6.3: the scale is the largest power of two that does not exceed the group's largest
magnitude, divided by that of the element type, 2 ** 2; quotients beyond 6 saturate.

NumPy alone decodes the values of the Zarr array:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("mxfp4")
>>> values = np.concatenate([entry.encode(blocks), fill_record(entry)])  # as a reader gives them; row 2 is a hole
>>> e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
>>> codes = np.stack([values[:, :12288] & 15, values[:, :12288] >> 4], axis=-1)
>>> e8m0 = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
>>> tokens = e2m1[codes].reshape(-1, 768, 32) * e8m0[values[:, 12288:]][..., None]
>>> np.array_equal(tokens.reshape(-1, 64, 384), entry.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E2M1, e8m0_values, mx_scale_codes


class MXFP4Codec(GroupScaledCodec):
    """E2M1 with an E8M0 scale for 32 numbers."""

    name = "mxfp4"
    logical_dtype = "mxfp4_e2m1"
    element = E2M1
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=32)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """OCP MX 1.0, section 6.3; the largest power of two of E2M1 is 2 ** 2."""
        return mx_scale_codes(largest, 2)
