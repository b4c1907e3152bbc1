"""`nvfp4`: NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025) with a fixed second-level scale.

Record of m tokens of width d: m x d / 2 bytes of E2M1 codes (as in `mxfp4`), tokens in order, two a byte with the
first in the low half; then m x d / 16 bytes of E4M3 scales (as the codes of `fp8`), one for every 16 consecutive
numbers of a token. 64 x 384: 12,288 + 1,536 = 13,824 bytes. d must be a multiple of 16.

Number = code x scale / 8, exact in bfloat16. The divisor is the format's fp32 second-level scale: 2 ** -3, the same
for all. Scales then have their full precision for groups whose largest magnitude is 0.012 to 336, and are subnormal
down to 0.0015; above 336 numbers saturate. A power of two keeps the products exact, and one constant keeps the record
at 13,824 bytes and independent of every other.

An encoder chooses the E4M3 nearest to 8/6 of the group's largest magnitude, at least the smallest, 2 ** -9; quotients
beyond 6 saturate.

NumPy alone decodes the values of the Zarr array:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> entry = codec("nvfp4")
>>> values = np.concatenate([entry.encode(blocks), fill_record(entry)])  # as a reader gives them; row 2 is a hole
>>> byte = np.arange(256)
>>> e4m3 = np.where(byte & 120, np.ldexp(8.0 + byte % 8, byte // 8 % 16 - 10), np.ldexp(byte % 8, -9))
>>> e4m3 = np.where(byte % 128 == 127, np.nan, e4m3) * np.where(byte < 128, 1, -1)
>>> e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
>>> codes = np.stack([values[:, :12288] & 15, values[:, :12288] >> 4], axis=-1)
>>> tokens = e2m1[codes].reshape(-1, 1536, 16) * e4m3[values[:, 12288:]][..., None] / 8
>>> np.array_equal(tokens.reshape(-1, 64, 384), entry.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E2M1, E4M3

SECOND_LEVEL_SCALE = 2.0**-3


class NVFP4Codec(GroupScaledCodec):
    """E2M1 with an E4M3 scale for 16 numbers and the constant `SECOND_LEVEL_SCALE`."""

    name = "nvfp4"
    logical_dtype = "nvfp4_e2m1"
    element = E2M1
    scale_values = E4M3.values * np.float32(SECOND_LEVEL_SCALE)

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=16)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The E4M3 nearest to largest / (6 SECOND_LEVEL_SCALE), saturated at 448, and never zero."""
        scales = largest.astype(np.float64) / (E2M1.largest * SECOND_LEVEL_SCALE)
        return np.maximum(E4M3.encode(scales), np.uint8(1))
