"""Codecs whose groups of numbers share a one-byte scale: fp8, mxfp8, mxfp4, nvfp4.

A number is code x scale. The product of an E4M3 or E2M1 code and an E8M0 or E4M3 scale has at most 8 significant
bits, so it is a bfloat16: decoding rounds nothing, save where the result is subnormal.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import BF16
from storage_formats.codecs.compiled import Bits, Bytes, CompiledCodec, Moves
from storage_formats.codecs.minifloat import CANONICAL_NAN, E4M3, NAN_CODE, MiniFloat
from storage_formats.errors import UsageError

LARGEST_INPUT = 15 * 2.0**124
"""Magnitudes above it are encoded as it: E4M3 would round them to 2**128, which is no bfloat16."""


class GroupScaledCodec(CompiledCodec):
    """Minifloat codes, two a byte where they have four bits, then the scales of all groups, in order.

    Attributes:
        element: type of the codes.
        scale_values: value of every scale code, float32 [256], NaN at 0xFF.
        group: consecutive numbers of a token that share a scale.
    """

    element: MiniFloat
    scale_values: NDArray[np.float32]

    def __init__(self, block_shape: tuple[int, int], group: int) -> None:
        m, d = block_shape
        if d % group:
            raise UsageError(
                f"{self.name} shares a scale among {group} numbers of a token and {d} (blocks of {m} x {d}) "
                f"is no multiple of {group}; use fp8 or int8, which take any width"
            )
        self.group = group
        self.codes_bytes = m * d if self.element is E4M3 else m * d // 2
        super().__init__(block_shape, self.codes_bytes + m * d // group)

    @staticmethod
    @abstractmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Scale code of a group by its largest magnitude, which is finite."""

    def _encode(self, bits: Bits, records: Bytes, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        if self.element is E4M3:  # its scales are powers of two: multiplying by their inverses is exact
            encode = kernels.encode_e4m3_tokens if self.group == self.block_shape[1] else kernels.encode_e4m3
            encode(bits, self._scale_table(), 1 / self.scale_values, records, self._shape, start, stop)
        else:
            kernels.encode_e2m1(bits, self._scale_table(), self.scale_values, records, self._shape, start, stop)

    def _decode(self, records: Bytes, moves: Moves, bits: Bits, start: int, stop: int) -> None:
        from storage_formats.codecs import kernels

        if self.element is E4M3:
            kernels.decode_e4m3(records, *moves, self._products(), bits, self._shape, start, stop)
        else:
            kernels.decode_e2m1(records, *moves, self._pairs(), bits.view(np.uint32), self._shape, start, stop)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (self.values, self.block_shape[1], self.group)

    @classmethod
    @functools.cache
    def _scale_table(cls) -> NDArray[np.uint8]:
        """Scale code by bits of a bfloat16 magnitude, uint8 [32768]; NaN for what is not finite."""
        magnitudes = np.arange(0x8000, dtype=np.uint16).view(BF16).astype(np.float32)
        finite = np.isfinite(magnitudes)
        table = np.full(len(magnitudes), NAN_CODE, dtype=np.uint8)
        table[finite] = cls.scale_codes(magnitudes[finite])
        return table

    @classmethod
    @functools.cache
    def _products(cls) -> NDArray[np.uint16]:
        """Bits of scale x code, uint16 [256 * codes]."""
        with np.errstate(over="ignore"):  # scales that no encoder writes
            products = (cls.scale_values[:, None] * cls.element.values).astype(BF16)
        return np.where(np.isnan(products), np.uint16(CANONICAL_NAN), products.view(np.uint16)).reshape(-1)

    @classmethod
    @functools.cache
    def _pairs(cls) -> NDArray[np.uint32]:
        """Bits of the two products of scale and byte, the low half's first, uint32 [256 * 256]."""
        products = cls._products().reshape(256, -1).astype(np.uint32)
        byte = np.arange(256)
        return (products[:, byte & 15] | (products[:, byte >> 4] << np.uint32(16))).reshape(-1)
