"""The table of the precisions, one row per record format. SPEC.md section 6.1 specifies
the records. `codecs.kernels` generates an encoder and a decoder for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BF16 = np.dtype(ml_dtypes.bfloat16)
NAN_CODE = 0xFF
"""A byte that is NaN in E8M0 and in E4M3. Two of these bytes are NaN in bfloat16."""
CANONICAL_NAN = 0x7FC0
"""Bits of the bfloat16 that every precision except `bf16` returns for a NaN."""
NAN_SCALE = 0xFFFF
"""Bits of the bfloat16 scale of a token that contains NaN or infinity. Both bytes equal
the fill value, so that a record of fill values decodes to NaN.
"""
INFINITY = 0x7F80
"""Bits of the bfloat16 infinity. Smaller bits are those of finite magnitudes."""
LARGE_LEVEL = 3.34375
"""The larger magnitude of a `gauss2` code, in units of the scale."""


@dataclass(frozen=True, eq=False)
class Format:
    """A record format. A record holds the codes of all values, then the scales. A value
    is the value of its code, times its scale, plus the offset.

    Attributes:
        name: name of the precision. The directory of its shards under `tokens/` has the
            same name.
        logical_dtype: number format of the stored values, for example `bfloat16` or
            `int8`.
        code_bits: bits per code: 1, 2, 4 or 8; or 16 for `bf16`, which has no scales.
        values: value of each code, float32 [2 ** code_bits], empty for `bf16`.
        scale_values: value of each scale code of one byte, float32 [256]. Empty if the
            scales are bfloat16 values.
        group: number of consecutive values of a token that share one scale. 0 means all
            values of the token.
        scale_shift: for E8M0 scales (rounding, exponent). The exponent of a scale is
            that of the largest magnitude in its group minus `exponent`, after
            `rounding` was added to the bits of the magnitude.
        token_range: (smallest, largest), the range in which the largest magnitude of a
            token should be, unless all values of the token are 0. A token whose largest
            magnitude is outside this range has larger errors than the tests allow.
    """

    name: str
    logical_dtype: str
    code_bits: int
    values: NDArray[np.float32]
    scale_values: NDArray[np.float32]
    group: int = 0
    scale_shift: tuple[int, int] | None = None
    token_range: tuple[float, float] = (0.0, math.inf)

    @property
    def scale_bytes(self) -> int:
        """Number of bytes of a scale."""
        return 1 if len(self.scale_values) else 2

    @property
    def is_float(self) -> bool:
        """Whether the values are minifloats, and not integers times a constant."""
        return self.scale_bytes == 1

    @property
    def width_multiple(self) -> int:
        """The width of a token must be a multiple of this number."""
        return self.group or max(1, 8 // self.code_bits)

    def token_bytes(self, width: int) -> int:
        """Return the number of bytes that a token of `width` values takes in a record,
        including its scales.
        """
        if self.code_bits == 16:
            return 2 * width
        scales = width // (self.group or width)
        return width * self.code_bits // 8 + scales * self.scale_bytes

    def scale_codes(self) -> NDArray[np.uint16]:
        """Return the scale code of a group, uint16 [32768], indexed by the bits of the
        largest magnitude in the group, a bfloat16.
        """
        bits = np.arange(INFINITY)
        finite = bits.astype(np.uint16).view(BF16).astype(np.float32)
        table = np.full(0x8000, NAN_SCALE, dtype=np.uint16)
        if self.scale_shift is not None:
            rounding, exponent = self.scale_shift
            codes = np.maximum(((bits + rounding) >> 7) - exponent, 0)
        elif self.scale_bytes == 1:
            # 6 and 448 are the largest values of E2M1 and E4M3
            scales = np.minimum(finite.astype(np.float64) / (6 * 2.0**-3), 448)
            codes = scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            codes = np.maximum(codes, 1)
        else:
            scales = (finite / 127).astype(BF16).astype(np.float32)
            scales = np.clip(scales, 2.0**-133, 2.0**121)
            codes = scales.astype(BF16).view(np.uint16)
        table[:INFINITY] = codes
        return table

    def products(self) -> NDArray[np.uint16]:
        """Return the bfloat16 bits of scale x code for each scale of one byte and each
        code, uint16 [256 * number of codes].
        """
        # Products overflow only for scales that no encoder writes.
        with np.errstate(over="ignore", invalid="ignore"):
            products = (self.scale_values[:, None] * self.values).astype(BF16)
        return np.where(
            np.isnan(products), np.uint16(CANONICAL_NAN), products.view(np.uint16)
        ).reshape(-1)


_CODES = np.arange(256, dtype=np.uint8)
# The value of each code of E4M3 (OCP OFP8 1.0), and of E2M1 and E8M0 (OCP
# Microscaling Formats (MX) 1.0, sections 5.3 and 5.4).
_E4M3 = _CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
# the kernels need the NaN without a sign
_E4M3[NAN_CODE] = np.nan
_E2M1 = _CODES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_E8M0 = _CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_BF16_SCALES = np.empty(0, np.float32)
_INTEGERS = _CODES.view(np.int8).astype(np.float32)
_LEVELS = np.array([1, -1, LARGE_LEVEL, -LARGE_LEVEL], np.float32)

FORMATS = {
    row.name: row
    for row in (
        Format("bf16", "bfloat16", 16, _BF16_SCALES, _BF16_SCALES),
        Format("int8", "int8", 8, _INTEGERS, _BF16_SCALES),
        # the smallest scale with which no code exceeds 448, that is 1.75 x 2 ** 8
        Format(
            "fp8",
            "float8_e4m3fn",
            8,
            _E4M3,
            _E8M0,
            scale_shift=(0x1F, 8),
        ),
        # The second-level scale of NVFP4 is the constant 1/8, so that a record does not
        # depend on other records. The range is that of the largest code, 6, x scale.
        Format(
            "nvfp4",
            "nvfp4_e2m1",
            4,
            _E2M1,
            _E4M3 * np.float32(2.0**-3),
            group=16,
            token_range=(6 * 2.0**-9 / 8, 6 * 448 / 8),
        ),
        # the largest power of two that does not exceed 1/4 of the largest magnitude
        Format(
            "mxfp4",
            "mxfp4_e2m1",
            4,
            _E2M1,
            _E8M0,
            group=32,
            scale_shift=(0, 2),
        ),
        Format("gauss2", "gauss2", 2, _LEVELS, _BF16_SCALES),
        Format("sign1", "sign1", 1, _LEVELS[:2], _BF16_SCALES),
    )
}
"""The format of each precision, most accurate first."""
