"""Codecs in which a group of values shares a one-byte scale: `fp8`, `mxfp8`, `mxfp4`, `nvfp4`.

A decoded value is code x scale. This product is an exact bfloat16 value unless the product is subnormal.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16, Bits, Bytes, Codec, Moves, Span
from storage_formats.codecs.minifloat import (
    CANONICAL_NAN,
    E2M1,
    E4M3,
    NAN_CODE,
    MiniFloat,
    e8m0_codes,
    e8m0_values,
    mx_scale_codes,
)
from storage_formats.errors import UsageError

SECOND_LEVEL_SCALE = 2.0**-3
"""The constant factor of all scales of `nvfp4`."""
LARGEST_INPUT = 15 * 2.0**124
"""Finite magnitudes above this limit are encoded as the limit, because E4M3 would round them to 2**128."""


class GroupScaledCodec(Codec):
    """Stores the codes of all values, then the scales of all groups. One byte stores one E4M3 code or two E2M1 codes.

    Attributes:
        element: number format of the codes.
        scale_values: value of each scale code, float32 [256]. The value of code 0xFF is NaN.
        group: number of consecutive values of a token that share one scale.
    """

    element: MiniFloat
    scale_values: NDArray[np.float32]

    def __init__(self, block_shape: tuple[int, int], group: int) -> None:
        m, d = block_shape
        if d % group:
            raise UsageError(
                f"precision '{self.name}' needs tokens whose width is a multiple of {group}, but the width is "
                f"{d}; use fp8 or int8, which accept any width"
            )
        self.group = group
        self.codes_bytes = m * d if self.element is E4M3 else m * d // 2
        super().__init__(block_shape, self.codes_bytes + m * d // group)

    @staticmethod
    @abstractmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the scale code of each group, uint8, with the shape of `largest`.

        Args:
            largest: largest magnitude of each group, float32, finite.
        """

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        from storage_formats.codecs import kernels

        if self.element is E4M3:  # with scales that are powers of two, so multiplying by the inverse is exact
            encode = kernels.encode_e4m3_tokens if self.group == self.block_shape[1] else kernels.encode_e4m3
            encode(bits, self._scale_table(), 1 / self.scale_values, records, self._geometry, span)
        else:
            kernels.encode_e2m1(bits, self._scale_table(), self.scale_values, records, self._geometry, span)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        from storage_formats.codecs import kernels

        if self.element is E4M3:
            kernels.decode_e4m3(records, moves, self._products(), bits, self._geometry, span)
        else:
            kernels.decode_e2m1(records, moves, self._pairs(), bits.view(np.uint32), self._geometry, span)

    @property
    def _geometry(self) -> tuple[int, int, int]:
        return (self.values, self.block_shape[1], self.group)

    @classmethod
    @functools.cache
    def _scale_table(cls) -> NDArray[np.uint8]:
        """Return the scale code for each bfloat16 magnitude, uint8 [32768], indexed by the bits of the magnitude."""
        magnitudes = np.arange(0x8000, dtype=np.uint16).view(BF16).astype(np.float32)
        finite = np.isfinite(magnitudes)
        table = np.full(len(magnitudes), NAN_CODE, dtype=np.uint8)
        table[finite] = cls.scale_codes(magnitudes[finite])
        return table

    @classmethod
    @functools.cache
    def _products(cls) -> NDArray[np.uint16]:
        """Return the bfloat16 bits of scale x code for each scale and code, uint16 [256 * number of codes]."""
        with np.errstate(over="ignore"):  # only scales that no encoder writes overflow
            products = (cls.scale_values[:, None] * cls.element.values).astype(BF16)
        return np.where(np.isnan(products), np.uint16(CANONICAL_NAN), products.view(np.uint16)).reshape(-1)

    @classmethod
    @functools.cache
    def _pairs(cls) -> NDArray[np.uint32]:
        """Return the bfloat16 bits of the two values in a byte, for each scale and byte, uint32 [256 * 256]."""
        # The value of the low four bits of the byte is in the lower half of a word.
        products = cls._products().reshape(256, -1).astype(np.uint32)
        byte = np.arange(256)
        return (products[:, byte & 15] | (products[:, byte >> 4] << np.uint32(16))).reshape(-1)


class FP8Codec(GroupScaledCodec):
    """E4M3 codes with one power-of-two scale per token.

    A record contains, for m tokens of width d:

    - m x d E4M3 codes of one byte, tokens in order
    - m E8M0 scales of one byte

    An E4M3 code has the sign in bit 7, the exponent (bias 7) in bits 6-3 and the fraction in bits 2-0. Exponent 0 is
    subnormal. 0x7F and 0xFF are NaN (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). An E8M0 scale is 2 **
    (byte - 127), and the byte 0xFF is NaN (OCP MX 1.0, section 5.4.1). A decoded value is code x scale.

    The encoder takes the smallest scale with which no code exceeds 448.
    """

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


class MXFP8Codec(GroupScaledCodec):
    """MXFP8 with E4M3 elements (OCP Microscaling Formats (MX) Specification 1.0, 2023).

    A record contains, for m tokens of width d, where d is a multiple of 32:

    - m x d E4M3 codes of one byte (see `fp8`), tokens in order
    - m x d / 32 E8M0 scales of one byte, one per group of 32 consecutive values of a token

    A decoded value is code x scale. The scale of a group is the largest power of two that does not exceed the largest
    magnitude of the group / 256 (section 6.3). Magnitudes above 448 x scale are stored as 448 x scale.
    """

    name = "mxfp8"
    logical_dtype = "mxfp8_e4m3"
    element = E4M3
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=32)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        return mx_scale_codes(largest, 8)


class MXFP4Codec(GroupScaledCodec):
    """MXFP4 (OCP Microscaling Formats (MX) Specification 1.0, 2023).

    A record contains, for m tokens of width d, where d is a multiple of 32:

    - m x d / 2 bytes of E2M1 codes, tokens in order, two codes per byte with the first in the low half
    - m x d / 32 E8M0 scales of one byte, one per group of 32 consecutive values of a token

    An E2M1 code has the sign in bit 3, the exponent (bias 1) in bits 2-1 and the fraction in bit 0. Its magnitudes are
    0, 0.5, 1, 1.5, 2, 3, 4 and 6. A scale is 2 ** (byte - 127), and the byte 0xFF is NaN. A decoded value is
    code x scale.

    The scale of a group is the largest power of two that does not exceed the largest magnitude of the group / 4
    (section 6.3). Magnitudes above 6 x scale are stored as 6 x scale.
    """

    name = "mxfp4"
    logical_dtype = "mxfp4_e2m1"
    element = E2M1
    scale_values = e8m0_values()

    def __init__(self, block_shape: tuple[int, int]) -> None:
        super().__init__(block_shape, group=32)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        return mx_scale_codes(largest, 2)


class NVFP4Codec(GroupScaledCodec):
    """NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025) with a fixed second-level scale.

    A record contains, for m tokens of width d, where d is a multiple of 16:

    - m x d / 2 bytes of E2M1 codes (see `mxfp4`), tokens in order, two codes per byte with the first in the low half
    - m x d / 16 E4M3 scales of one byte (see `fp8`), one per group of 16 consecutive values of a token

    A decoded value is code x scale / 8, which is an exact bfloat16 value. The factor 1/8 is the second-level scale of
    NVFP4. This factor is constant, so that a record does not depend on other records.

    The scale is 8/6 of the largest magnitude of the group, rounded to the nearest E4M3 number, and at least 2 ** -9.
    Magnitudes above 6 x scale / 8 are stored as 6 x scale / 8.
    """

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
