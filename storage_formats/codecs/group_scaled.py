"""Codecs in which a group of values shares a one-byte scale: `fp8`, `mxfp8`, `mxfp4`, `nvfp4`.

A decoded value is code x scale. This product is an exact bfloat16 value unless the product is subnormal.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16, Bits, Bytes, Codec, Moves, Span
from storage_formats.codecs.minifloat import CANONICAL_NAN, E4M3, NAN_CODE, MiniFloat
from storage_formats.errors import UsageError

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
