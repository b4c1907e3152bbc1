"""The small floating-point formats of records: E4M3, E2M1 and E8M0.

- E4M3: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), and OCP OFP8 1.0.
- E2M1: OCP Microscaling Formats (MX) 1.0, section 5.3.
- E8M0: OCP Microscaling Formats (MX) 1.0, section 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MiniFloat:
    """A floating-point format with a sign, an exponent and a fraction. It has
    subnormals and no infinities.

    Attributes:
        exponent_bits, fraction_bits: number of bits of each field.
        bias: bias of the exponent, as in IEEE 754.
        has_nan: whether the two codes with all exponent and fraction bits set are NaN.
            Otherwise they are numbers.
    """

    exponent_bits: int
    fraction_bits: int
    bias: int
    has_nan: bool

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """The value of each code, float32 [2 ** (1 + exponent_bits +
        fraction_bits)].
        """
        magnitude_bits = self.exponent_bits + self.fraction_bits
        code = np.arange(2 << magnitude_bits)
        exponent = (code >> self.fraction_bits) & ((1 << self.exponent_bits) - 1)
        fraction = code & ((1 << self.fraction_bits) - 1)
        significand = np.where(
            exponent > 0, fraction + (1 << self.fraction_bits), fraction
        )
        value = np.ldexp(
            significand.astype(np.float32),
            np.maximum(exponent, 1) - self.bias - self.fraction_bits,
        )
        values: NDArray[np.float32] = np.where(code >> magnitude_bits, -value, value)
        if self.has_nan:
            values[
                (code & ((1 << magnitude_bits) - 1)) == (1 << magnitude_bits) - 1
            ] = np.nan
        return values

    @cached_property
    def magnitudes(self) -> NDArray[np.float32]:
        """The finite non-negative values, float32, ascending from zero. The index
        of a value is its code.
        """
        positive = self.values[: len(self.values) // 2]
        return positive[np.isfinite(positive)]

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(self.magnitudes[-1])

    def encode(self, numbers: NDArray[np.floating]) -> NDArray[np.uint8]:
        """Return the codes of finite `numbers`, uint8, rounded to nearest, ties to
        even. Magnitudes are limited to `largest`.
        """
        middles = (self.magnitudes[1:] + self.magnitudes[:-1]) / 2
        # a tie goes to the lower code
        below = np.searchsorted(middles, np.abs(numbers), side="left")
        # a tie goes to the higher code
        above = np.searchsorted(middles, np.abs(numbers), side="right")
        # a tie goes to the even code
        nearest = np.where(below % 2 == 0, below, above)
        sign = np.signbit(numbers).astype(np.intp) << (
            self.exponent_bits + self.fraction_bits
        )
        codes: NDArray[np.uint8] = (nearest | sign).astype(np.uint8)
        return codes


BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = MiniFloat(exponent_bits=4, fraction_bits=3, bias=7, has_nan=True)
E2M1 = MiniFloat(exponent_bits=2, fraction_bits=1, bias=1, has_nan=False)

NAN_CODE = 0xFF
"""A byte that is NaN in E8M0 and in E4M3. Two of these bytes are NaN in bfloat16."""

CANONICAL_NAN = 0x7FC0
"""Bits of the bfloat16 that every precision except `bf16` returns for a NaN."""


E8M0_VALUES = (
    np.append(
        # bits of 2 ** -127, which is subnormal
        np.append(1 << 22, np.arange(1, NAN_CODE) << 23),
        CANONICAL_NAN << 16,
    )
    .astype(np.uint32)
    .view(np.float32)
)
"""The value of each E8M0 code, float32 [256]: 2 ** (code - 127) for codes 0 to 254, and
NaN for code 255.
"""
