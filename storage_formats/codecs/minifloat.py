"""The small floating-point formats of records, implemented directly from their definitions.

E4M3: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), the variant without infinities, also in the OCP
8-bit Floating Point Specification (OFP8) 1.0. E2M1 and E8M0: OCP Microscaling Formats (MX) Specification 1.0,
sections 5.3 and 5.4. The compiled kernels take their tables from here, and tests compare them with this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MiniFloat:
    """A sign bit, an exponent field and a fraction field, with subnormals and without infinities.

    Attributes:
        exponent_bits, fraction_bits, bias: as in IEEE 754.
        has_nan: whether the code with all exponent and fraction bits set is NaN instead of a number.
    """

    exponent_bits: int
    fraction_bits: int
    bias: int
    has_nan: bool

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """The value of every code, float32 [2 ** (1 + exponent_bits + fraction_bits)]."""
        magnitude_bits = self.exponent_bits + self.fraction_bits
        code = np.arange(2 << magnitude_bits)
        exponent = (code >> self.fraction_bits) & ((1 << self.exponent_bits) - 1)
        fraction = code & ((1 << self.fraction_bits) - 1)
        significand = np.where(exponent > 0, fraction + (1 << self.fraction_bits), fraction)
        value = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - self.bias - self.fraction_bits)
        if self.has_nan:
            value[(code & ((1 << magnitude_bits) - 1)) == (1 << magnitude_bits) - 1] = np.nan
        values: NDArray[np.float32] = np.where(code >> magnitude_bits, -value, value)
        return values

    @cached_property
    def magnitudes(self) -> NDArray[np.float32]:
        """The finite values from zero up. The index of a value is its code."""
        positive = self.values[: len(self.values) // 2]
        return positive[np.isfinite(positive)]

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(self.magnitudes[-1])

    def encode(self, numbers: NDArray[np.floating]) -> NDArray[np.uint8]:
        """Codes of finite `numbers`, rounded to nearest, ties to the even code, saturated at `largest`. Keeps -0."""
        middles = (self.magnitudes[1:] + self.magnitudes[:-1]) / 2
        below = np.searchsorted(middles, np.abs(numbers), side="left")  # a tie goes down
        above = np.searchsorted(middles, np.abs(numbers), side="right")  # a tie goes up
        nearest = np.where(below % 2 == 0, below, above)
        sign = np.signbit(numbers).astype(np.intp) << (self.exponent_bits + self.fraction_bits)
        codes: NDArray[np.uint8] = (nearest | sign).astype(np.uint8)
        return codes


E4M3 = MiniFloat(exponent_bits=4, fraction_bits=3, bias=7, has_nan=True)
E2M1 = MiniFloat(exponent_bits=2, fraction_bits=1, bias=1, has_nan=False)

NAN_CODE = 0xFF
"""The byte that stands for NaN: NaN in E8M0 and E4M3 and, repeated, in bfloat16."""

CANONICAL_NAN = 0x7FC0
"""Bits of the bfloat16 to which every NaN decodes."""


def e8m0_values() -> NDArray[np.float32]:
    """The value of every E8M0 code, float32 [256]: 2 ** (code - 127), and NaN for 255."""
    return np.append(np.ldexp(np.float32(1), np.arange(NAN_CODE) - 127), np.float32(np.nan)).astype(np.float32)


def e8m0_codes(exponents: NDArray[np.integer]) -> NDArray[np.uint8]:
    """E8M0 codes of 2 ** `exponents`, saturated at 2 ** -127 and 2 ** 127."""
    codes: NDArray[np.uint8] = (np.clip(exponents, -127, 127) + 127).astype(np.uint8)
    return codes


def mx_scale_codes(largest: NDArray[np.float32], element_exponent: int) -> NDArray[np.uint8]:
    """E8M0 codes for groups with the finite largest magnitudes `largest` (OCP MX 1.0, section 6.3).

    The scale is the largest power of two that does not exceed the magnitude, divided by 2 ** `element_exponent`, the
    largest power of two of the element format. Zero gets the smallest scale.
    """
    _, exponent = np.frexp(largest)  # largest = f x 2 ** exponent, f in [0.5, 1)
    return e8m0_codes(np.where(largest > 0, exponent - 1 - element_exponent, -127))
