"""`nvfp4`: NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025) with a fixed second-level scale.

A record contains, for m tokens of width d, where d is a multiple of 16:

- m x d / 2 bytes of E2M1 codes (see `mxfp4`), tokens in order, two codes per byte with the first in the low half
- m x d / 16 E4M3 scales of one byte (see `fp8`), one per group of 16 consecutive values of a token

A decoded value is code x scale / 8, which is an exact bfloat16 value. The factor 1/8 is the second-level scale of
NVFP4. This factor is constant, so that a record does not depend on other records.

The scale is 8/6 of the largest magnitude of the group, rounded to the nearest E4M3 number, and at least 2 ** -9.
Magnitudes above 6 x scale / 8 are stored as 6 x scale / 8. This example decodes the Zarr array with NumPy alone:

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec, fill_record
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> nvfp4 = codec("nvfp4")
>>> values = np.concatenate([nvfp4.encode(blocks), fill_record(nvfp4)])  # as Zarr readers return them; row 2: a hole
>>> byte = np.arange(256)
>>> e4m3 = np.where(byte & 120, np.ldexp(8.0 + byte % 8, byte // 8 % 16 - 10), np.ldexp(byte % 8, -9))
>>> e4m3 = np.where(byte % 128 == 127, np.nan, e4m3) * np.where(byte < 128, 1, -1)
>>> e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
>>> codes = np.stack([values[:, :12288] & 15, values[:, :12288] >> 4], axis=-1)
>>> tokens = e2m1[codes].reshape(-1, 1536, 16) * e4m3[values[:, 12288:]][..., None] / 8
>>> np.array_equal(tokens.reshape(-1, 64, 384), nvfp4.decode(values).astype(float), equal_nan=True)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import E2M1, E4M3

SECOND_LEVEL_SCALE = 2.0**-3


class NVFP4Codec(GroupScaledCodec):
    """Stores E2M1 codes with one E4M3 scale per 16 values. See `storage_formats.codecs.base.Codec`."""

    name = "nvfp4"
    logical_dtype = "nvfp4_e2m1"
    element = E2M1
    scale_values = E4M3.values * np.float32(SECOND_LEVEL_SCALE)

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=16)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        scales = largest.astype(np.float64) / (E2M1.largest * SECOND_LEVEL_SCALE)
        return np.maximum(E4M3.encode(scales), np.uint8(1))
