"""The compiled kernels of the codecs, one encoder and one decoder per row of
`codecs.formats`. A codec imports this module and Numba at the first conversion.

A kernel runs on the calling thread and releases the GIL, so a caller may run one kernel
on several threads at once. Each kernel takes flat arrays and some of these arguments:

- `geometry`: (values per block, values per token)
- `moves`: (offsets, blocks); the record at byte `offsets[i]` is decoded to block
  `blocks[i]` of the output

All kernels and their helpers are in this module, because Numba's cache detects changes
only in the file of the kernel. Indices are unsigned, so that LLVM can vectorise the
loops. A helper takes an array and the index of the first element instead of a slice,
because Numba would count the references to the slice, which costs time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.formats import LARGE_LEVEL, Format
from storage_formats.codecs.kernel_compiler import (
    fused,
    inlined,
    input_array,
    kernel,
    output_array,
    prefer_wide_vectors,
    summing,
    types,
    with_default_modes,
)

U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
F32: TypeAlias = NDArray[np.float32]
Moves: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
Index: TypeAlias = np.uint64
Pair: TypeAlias = tuple[Index, Index]
Triple: TypeAlias = tuple[Index, Index, Index]

ZERO = np.uint64(0)
ONE = np.uint64(1)
TWO = np.uint64(2)
THREE = np.uint64(3)
FOUR = np.uint64(4)
EIGHT = np.uint64(8)
NO_BITS = np.uint16(0)
# all bits of a bfloat16 except the sign
MAGNITUDE_BITS = np.uint16(0x7FFF)
INFINITY_BITS = np.uint16(0x7F80)
NAN_BITS = np.uint16(0x7FC0)
# number of iterations of the inner loops, constant so that LLVM vectorises the loops
PIECE = np.uint64(32)
HALF_PIECE = np.uint64(16)
# number of values of the offset that stay in the first-level cache
OFFSET_PIECE = np.uint64(4096)
# see `codecs.formats`
NAN_SCALE = np.uint16(0xFFFF)
NAN_CODE = np.uint8(0xFF)
# bits of 2 ** 126
LARGEST_SCALE = np.uint16(0x7E80)

_TRIPLE = types.UniTuple(types.uint64, 3)
_PAIR = types.UniTuple(types.uint64, 2)
_MOVES = types.UniTuple(types.Array(types.int64, 1, "C"), 2)


@inlined
def _bits(number: np.float32) -> Any:
    return np.float32(number).view(np.uint32)


@inlined
def _bf16(bits: np.uint16) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def _rounded_bf16(number: np.float32) -> np.uint16:
    """Return the bits of the bfloat16 nearest to `number`, ties to even; 0x7FC0 if
    `number` is NaN.
    """
    bits = _bits(number)
    even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return np.uint16(rounded) if number == number else NAN_BITS


@fused
def _rounded_sum(value: np.float32, scale: np.float32, offset: np.float32) -> Any:
    """Return value x scale + offset, rounded to bfloat16, in the upper half of a word
    of 32 bits. The lower half is arbitrary.

    The product must be exact, so that multiplying and adding in one instruction gives
    the same sum. If the sum is NaN, its bits must be 0x7FC00000, so that rounding keeps
    the NaN.
    """
    total = _bits(value * scale + offset)
    is_odd = total & np.uint32(0x10000)
    half = np.uint32(0x8000) if is_odd else np.uint32(0x7FFF)
    return np.uint32(total + half)


@fused
def _sum(value: np.float32, scale: np.float32, offset: np.float32) -> Any:
    """Return the bfloat16 bits of `_rounded_sum`."""
    return np.uint16(_rounded_sum(value, scale, offset) >> np.uint32(16))


@inlined
def _total(
    value: np.float32,
    scale: np.float32,
    offset: np.float32,
    is_float: bool,
    has_offset: bool,
) -> Any:
    """Return the bfloat16 bits of value x scale, plus the offset if there is one. The
    product of a minifloat and its scale must be a bfloat16 number.
    """
    if has_offset:
        return _sum(value, scale, offset)
    # 1.2 to 1.5 times as fast as adding an offset of zeros
    if is_float:
        return np.uint16(_bits(value * scale) >> np.uint32(16))
    return _sum(value, scale, np.float32(-0.0))


@inlined
def _write_word(records: U8, at: Index, word: np.uint16) -> None:
    records[at] = np.uint8(word)
    records[at + ONE] = np.uint8(word >> np.uint16(8))


@inlined
def _read_word(records: U8, at: Index) -> Any:
    return np.uint16(
        np.uint16(records[at]) | np.uint16(np.uint16(records[at + ONE]) << np.uint16(8))
    )


@inlined
def _read_long(records: U8, at: Index) -> Any:
    """Return the four bytes at `at` as an integer."""
    high = np.uint32(_read_word(records, at + TWO))
    return np.uint32(_read_word(records, at) | np.uint32(high << np.uint32(16)))


@kernel(
    input_array(types.uint16), input_array(types.float32), output_array(types.uint16)
)
def subtract_offset(bits: U16, offset: F32, residuals: U16) -> None:
    """Write blocks minus an offset [m * d], rounded to bfloat16, to `residuals`."""
    prefer_wide_vectors()
    count = np.uint64(len(offset))
    # All blocks are processed for one part of the offset before the next part, so that
    # the part stays in the first-level cache.
    for begin in range(ZERO, count, OFFSET_PIECE):
        end = min(begin + OFFSET_PIECE, count)
        for first in range(ZERO, np.uint64(len(bits)), count):
            for i in range(begin, end):
                number = _bf16(bits[first + i])
                residuals[first + i] = _sum(number, np.float32(1), -offset[i])


@inlined
def _extremes(bits: U16, first: Index, count: Index) -> Any:
    """Return the bits of the largest magnitude in `bits[first:first + count]`, and of
    the smallest that is not zero. NaN is larger than infinity.
    """
    largest = NO_BITS
    # the subtraction turns zero into 0xFFFF, so that zero is never the smallest
    below = np.uint16(0xFFFF)
    for i in range(count):
        magnitude = np.uint16(bits[first + i] & MAGNITUDE_BITS)
        largest = max(largest, magnitude)
        below = min(below, np.uint16(magnitude - np.uint16(1)))
    return largest, int(below) + 1


@inlined
def _minifloat_code(
    number: np.float32, fraction_bits: int, bias: int, largest: float
) -> np.uint32:
    """Return the minifloat code of |number|, rounded to nearest, ties to even.
    Magnitudes above `largest` get the code of `largest`.
    """
    # Integer arithmetic on the bits rounds normal results. For subnormal results,
    # adding a power of two whose last bit has the weight of the smallest subnormal
    # rounds the number, and the low bits of the sum are the code.
    magnitude = min(abs(number), np.float32(largest))
    bits = _bits(magnitude)
    dropped = np.uint32(23 - fraction_bits)
    even = np.uint32(bits >> dropped) & np.uint32(1)
    rounded = (
        np.uint32(bits + np.uint32((1 << (22 - fraction_bits)) - 1) + even) >> dropped
    )
    normal = np.uint32(rounded - np.uint32((127 - bias) << fraction_bits))
    aligner = np.float32(2.0 ** (24 - fraction_bits - bias))
    subnormal = np.uint32(_bits(magnitude + aligner) - _bits(aligner))
    return subnormal if magnitude < np.float32(2.0 ** (1 - bias)) else normal


@inlined
def _rounded_code(number: np.uint16, scale: np.float32, code_bits: Index) -> Any:
    """Return the E4M3 or E2M1 code of the bfloat16 `number` divided by `scale`."""
    # Rounding to the few significant bits of a code could turn numbers above
    # 15 x 2**124 into 2**128, which is infinite in bfloat16.
    magnitude = _bf16(min(np.uint16(number & MAGNITUDE_BITS), np.uint16(0x7F70)))
    if code_bits == EIGHT:
        code = _minifloat_code(magnitude / scale, 3, 7, 448.0)
    else:
        code = _minifloat_code(magnitude / scale, 1, 1, 6.0)
    sign = np.uint32(number >> np.uint16(15)) << np.uint32(code_bits - ONE)
    return np.uint8(code | sign)


@inlined
def _shifted_code(number: np.uint16, exponent: np.uint16) -> Any:
    """Return the E4M3 code of the bfloat16 `number` divided by a scale, whose exponent
    is in the exponent bits of `exponent`. The code must be zero or normal.
    """
    magnitude = np.uint16(number & MAGNITUDE_BITS)
    field = np.uint16(magnitude - exponent) if magnitude else NO_BITS
    even = np.uint16(field >> np.uint16(4)) & np.uint16(1)
    rounded = np.uint16(np.uint16(field + np.uint16(7) + even) >> np.uint16(4))
    code = min(rounded, np.uint16(0x7E))
    return np.uint8(
        code | np.uint16(np.uint16(number >> np.uint16(8)) & np.uint16(0x80))
    )


@inlined
def _integer_code(number: np.float32, scale: np.float32) -> Any:
    """Return the integer nearest to number / scale."""
    # The last bit of this number has the weight 1. Adding the number therefore rounds
    # to an integer, which is in the low bits of the sum.
    shifter = np.float32(1.5 * 2.0**23)
    quotient = min(max(number / scale, np.float32(-127)), np.float32(127))
    return np.uint8(_bits(quotient + shifter))


def _moments(bits: U16, first: Index, width: Index, limit: float) -> Any:
    """Return the sum of the magnitudes of a token up to `limit`, the sum of the larger
    ones, and the number of the larger ones.
    """
    small = large = larger = 0.0
    for i in range(width):
        number = np.float64(_bf16(np.uint16(bits[first + i] & MAGNITUDE_BITS)))
        is_large = number > limit
        small += 0.0 if is_large else number
        large += number if is_large else 0.0
        larger += 1.0 if is_large else 0.0
    return small, large, larger


_moments_in_order = inlined(_moments)
_moments_in_any_order = summing(_moments)


@inlined
def _packed(word: Any, code_bits: Index) -> Any:
    """Return the byte with the codes in `word`, which contains one code per byte."""
    if code_bits == ONE:
        # the product has bit i of the result from byte i of the word
        return np.uint8((word * np.uint64(0x0102040810204080)) >> np.uint64(56))
    if code_bits == TWO:
        word |= word >> np.uint32(6)
        return np.uint8(word | np.uint32(word >> np.uint32(12)))
    if code_bits == FOUR:
        return np.uint8(word | np.uint16(word >> np.uint16(4)))
    return np.uint8(word)


_WORDS = {1: np.uint64, 2: np.uint32, 4: np.uint16, 8: np.uint8}


@functools.cache
@with_default_modes
def encoder(form: Format, has_offset: bool) -> Callable[..., None]:
    """Return the kernel that encodes blocks to the records of `form`.

    Its arguments are the bits of the blocks, an offset [m * d] that is subtracted if
    the codes are integers, the records, and `geometry`.
    """
    code_bits = np.uint64(form.code_bits)
    group = np.uint64(form.group)
    scale_bytes = np.uint64(form.scale_bytes)
    is_float = form.is_float
    scale_codes = form.scale_codes()
    scale_values = form.scale_values
    word_type = _WORDS[form.code_bits]

    def encode(bits: U16, offset: F32, records: U8, geometry: Pair) -> None:
        size, width = geometry
        tokens = size // width
        per_scale = group if group else width
        scales = width // per_scale
        token_bytes = (width * code_bits) >> THREE
        group_bytes = token_bytes // scales
        codes = np.empty(width, dtype=np.uint8)
        words = codes.view(word_type)
        numbers = np.empty(width, dtype=np.float32)
        for block in range(np.uint64(len(bits)) // size):
            record = block * tokens * (token_bytes + scales * scale_bytes)
            for token in range(tokens):
                at = token * width
                first = block * size + at
                codes_at = record + token * token_bytes
                scales_at = record + tokens * token_bytes
                scales_at += token * scales * scale_bytes
                scale = NO_BITS
                has_nan = False
                is_packed = code_bits == EIGHT and not is_float
                if code_bits <= TWO:
                    limit = np.inf
                    if code_bits == TWO:
                        squares = 0.0
                        for i in range(width):
                            number = np.float64(
                                _bf16(np.uint16(bits[first + i] & MAGNITUDE_BITS))
                            )
                            squares += number * number
                        limit = 0.9816 * math.sqrt(squares / width)
                    largest, smallest = _extremes(bits, first, width)
                    # The sum of at most 2 ** 16 values needs the 8 bits of a
                    # magnitude, one bit for each step between the exponents, and 16
                    # bits for carries. If these are at most the 53 bits of a float64,
                    # the sum is exact, and therefore the same in any order.
                    steps = (int(largest) >> 7) - (smallest >> 7)
                    if steps <= 53 - 8 - 16 and width <= 1 << 16:
                        small, large, larger = _moments_in_any_order(
                            bits, first, width, limit
                        )
                    else:
                        small, large, larger = _moments_in_order(
                            bits, first, width, limit
                        )
                    for i in range(width):
                        sign = np.uint8(np.uint16(bits[first + i] >> np.uint16(15)))
                        is_large = np.uint8(0)
                        if code_bits == TWO:
                            number = np.float64(
                                _bf16(np.uint16(bits[first + i] & MAGNITUDE_BITS))
                            )
                            is_large = np.uint8(2) if number > limit else is_large
                        codes[i] = np.uint8(sign | is_large)
                    weight = (width - larger) + LARGE_LEVEL * LARGE_LEVEL * larger
                    scale = _rounded_bf16(
                        np.float32((small + LARGE_LEVEL * large) / weight)
                    )
                    if scale >= INFINITY_BITS:
                        scale = NAN_SCALE
                    elif code_bits == TWO:
                        # with a larger scale, scale x LARGE_LEVEL would be infinite
                        scale = min(scale, LARGEST_SCALE)
                elif not is_float:
                    rounded, _ = _extremes(bits, first, width)
                    if has_offset:
                        greatest = np.uint32(0)
                        for i in range(width):
                            number = _bf16(bits[first + i]) - offset[at + i]
                            numbers[i] = number
                            magnitude = np.uint32(_bits(number) & np.uint32(0x7FFFFFFF))
                            greatest = max(greatest, magnitude)
                        rounded = _rounded_bf16(np.uint32(greatest).view(np.float32))
                    scale = scale_codes[rounded]
                    for i in range(width):
                        number = numbers[i] if has_offset else _bf16(bits[first + i])
                        records[codes_at + i] = _integer_code(number, _bf16(scale))
                else:
                    smallest = 0
                    for index in range(scales):
                        largest, smallest = _extremes(
                            bits, first + index * per_scale, per_scale
                        )
                        scale = scale_codes[largest]
                        has_nan |= scale == NAN_SCALE
                        records[scales_at + index] = np.uint8(scale)
                    exponent = np.uint16(np.uint16(scale - 7) << np.uint16(7))
                    if (
                        code_bits == EIGHT
                        and 7 <= scale < 240
                        and smallest >= int(exponent) + 0x80
                    ):
                        # 2.4 times as fast as `_rounded_code`
                        for i in range(width):
                            code = _shifted_code(bits[first + i], exponent)
                            records[codes_at + i] = code
                        is_packed = True
                    else:
                        whole = width - width % PIECE
                        for piece in range(ZERO, whole, PIECE):
                            left = scale_values[records[scales_at + piece // per_scale]]
                            middle = (piece + HALF_PIECE) // per_scale
                            right = scale_values[records[scales_at + middle]]
                            for i in range(PIECE):
                                divisor = left if i < HALF_PIECE else right
                                codes[piece + i] = _rounded_code(
                                    bits[first + piece + i], divisor, code_bits
                                )
                        for i in range(whole, width):
                            divisor = scale_values[records[scales_at + i // per_scale]]
                            codes[i] = _rounded_code(
                                bits[first + i], divisor, code_bits
                            )
                if not is_packed:
                    for i in range(token_bytes):
                        records[codes_at + i] = _packed(words[i], code_bits)
                if scale_bytes == TWO:
                    _write_word(records, scales_at, scale)
                    has_nan = scale == NAN_SCALE
                if has_nan:
                    for i in range(token_bytes):
                        if (
                            records[scales_at + i // group_bytes * scale_bytes]
                            == NAN_CODE
                        ):
                            records[codes_at + i] = NAN_CODE

    suffix = "_difference" if has_offset else ""
    encode.__qualname__ = f"encode_{form.name}{suffix}"
    return kernel(
        input_array(types.uint16),
        input_array(types.float32),
        output_array(types.uint8),
        _PAIR,
    )(encode)


@inlined
def _unpacked(byte: int, code_bits: Index) -> Any:
    """Return a word with one code per byte, see `_packed`."""
    if code_bits == FOUR:
        pair = np.uint16(byte)
        return np.uint16(pair | np.uint16(pair << np.uint16(4))) & np.uint16(0x0F0F)
    four = np.uint32(byte)
    four = np.uint32(four | np.uint32(four << np.uint32(12)))
    four = np.uint32(four | np.uint32(four << np.uint32(6)))
    return np.uint32(four & np.uint32(0x03030303))


@inlined
def _widened(code: np.uint8, code_bits: Index) -> Any:
    """Return the E4M3 code of the value of an E2M1 code, or the integer 32 x level of
    a code of two bits.
    """
    if code_bits == FOUR:
        magnitude = np.uint8(code & np.uint8(7))
        wide = np.uint8(np.uint8(magnitude << np.uint8(2)) + np.uint8(0x30))
        wide = np.uint8(0x30) if magnitude == np.uint8(1) else wide
        wide = wide if magnitude else np.uint8(0)
        return np.uint8(wide | np.uint8(np.uint8(code << np.uint8(4)) & np.uint8(0x80)))
    # LLVM vectorises these masks, but not comparisons
    sign = np.uint8(code & np.uint8(1))
    large = np.uint8(np.uint8(0) - np.uint8(code >> np.uint8(1)))
    level = np.uint8(np.uint8(32) + np.uint8(large & np.uint8(107 - 32)))
    return np.uint8(np.uint8(level ^ np.uint8(np.uint8(0) - sign)) + sign)


@inlined
def _number(code: np.uint8, is_float: bool) -> Any:
    """Return the value of an E4M3 code times 2 ** -120, or the value of an integer."""
    if not is_float:
        return np.float32(np.int8(code))
    word = np.uint32(np.int32(np.int32(np.int8(code)) << np.int32(20)))
    return np.uint32(word & np.uint32(0x87F00000)).view(np.float32)


@inlined
def _scale(records: U8, at: Index, scale_bytes: Index, scale_values: F32) -> Any:
    """Return the scale at byte `at`."""
    if scale_bytes == TWO:
        return _bf16(_read_word(records, at))
    return scale_values[records[at]]


@inlined
def _has_nan(records: U8, first: Index, count: Index) -> bool:
    """Return True if one of the E4M3 codes is NaN."""
    highest = np.uint8(0)
    for i in range(first, first + count):
        highest = max(highest, np.uint8(records[i] << np.uint8(1)))
    return bool(highest == 0xFE)


@inlined
def _careful_sum(
    value: np.float32, scale: np.float32, offset: np.float32, rounds: bool
) -> Any:
    """Return the bfloat16 bits of value x scale + offset for any numbers. If `rounds`,
    the product is rounded to bfloat16 first.
    """
    product = value * scale
    if rounds:
        product = _bf16(_rounded_bf16(product))
    return _rounded_bf16(product + offset)


# bits of the values with even and with odd indices in two words of 32 bits
EVEN_BITS = np.tile(np.uint32(1) << np.arange(0, 32, 2, dtype=np.uint32), 2)
ODD_BITS = EVEN_BITS << np.uint32(1)


@inlined
def _signed(
    word: int, mask: int, scale: np.float32, offset: np.float32, has_offset: bool
) -> Any:
    """Return the bits of the scale with the sign that a bit selects, plus the offset if
    there is one.
    """
    number = -scale if np.uint32(word & mask) else scale
    if has_offset:
        return _rounded_sum(number, np.float32(1), offset)
    return _bits(number)


@functools.cache
@with_default_modes
def decoder(form: Format, has_offset: bool) -> Callable[..., None]:
    """Return the kernel that decodes records of `form`.

    Its arguments are the records, `moves`, the offset, the bits of the blocks, and
    `geometry`. The offset [m * d] is added to each block. For `sign1`, it
    contains first the values with even indices, and then those with odd indices.
    """
    code_bits = np.uint64(form.code_bits)
    group = np.uint64(form.group)
    scale_bytes = np.uint64(form.scale_bytes)
    is_float = form.is_float
    word_type = _WORDS[form.code_bits]
    values = form.values
    code_mask = np.uint8(len(values) - 1)
    scale_values = form.scale_values
    # `_number` returns multiples of the values
    unit = np.float32(2.0**120 if is_float else 2.0**-5 if form.code_bits == 2 else 1)
    # With scales from `low` up to `high`, all products are exact, and `scale * unit` is
    # finite.
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    low = np.float32(2.0**-133 / magnitudes.min())
    if is_float and not has_offset:
        # The product of a minifloat and its scale has at most 8 significant bits, so
        # it is a bfloat16 number unless it is subnormal.
        low = np.float32(2.0**-126 / magnitudes.min())
    high = np.float32(2.0**127 / max(magnitudes.max(), unit))
    is_extreme = (np.abs(scale_values) < low) | (np.abs(scale_values) >= high)
    has_extremes = bool(is_extreme.any())

    def decode(
        records: U8, moves: Moves, offset: F32, bits: U16, geometry: Pair
    ) -> None:
        prefer_wide_vectors()
        size, width = geometry
        tokens = size // width
        per_scale = group if group else width
        scales = width // per_scale
        token_bytes = (width * code_bits) >> THREE
        codes = np.empty(width, dtype=np.uint8)
        words = codes.view(word_type)
        wide = np.empty(width, dtype=np.uint8)
        if code_bits == ONE:
            pairs = bits.view(np.uint32)
        offsets, blocks = moves
        for move in range(np.uint64(len(offsets))):
            for token in range(tokens):
                at = token * width
                record = np.uint64(offsets[move])
                codes_at = record + token * token_bytes
                scales_at = record + tokens * token_bytes
                scales_at += token * scales * scale_bytes
                target = np.uint64(blocks[move]) * size + at
                scale = _scale(records, scales_at, scale_bytes, scale_values)
                # the number of values that the fast loops decode
                done = width
                if group:
                    done = width - width % PIECE
                if scale_bytes == TWO and not low <= abs(scale) < high:
                    done = ZERO
                if has_extremes:
                    for index in range(scales):
                        if is_extreme[records[scales_at + index]]:
                            done = ZERO
                checks_codes = code_bits == EIGHT and is_float
                if checks_codes and _has_nan(records, codes_at, width):
                    done = ZERO
                if TWO <= code_bits <= FOUR:
                    for i in range(token_bytes):
                        words[i] = _unpacked(records[codes_at + i], code_bits)
                    for i in range(width):
                        wide[i] = _widened(codes[i], code_bits)
                if code_bits == ONE:
                    done = done - done % (TWO * PIECE)
                    for piece in range(ZERO, done >> ONE, PIECE):
                        word_at = codes_at + (piece >> TWO)
                        left_bits = _read_long(records, word_at)
                        right_bits = _read_long(records, word_at + FOUR)
                        even = (at >> ONE) + piece
                        odd = even + (size >> ONE)
                        pair = (target >> ONE) + piece
                        for i in range(PIECE):
                            signs = left_bits if i < HALF_PIECE else right_bits
                            a = _signed(
                                signs,
                                EVEN_BITS[i],
                                scale,
                                offset[even + i],
                                has_offset,
                            )
                            b = _signed(
                                signs,
                                ODD_BITS[i],
                                scale,
                                offset[odd + i],
                                has_offset,
                            )
                            pairs[pair + i] = np.uint32(a >> np.uint32(16)) | np.uint32(
                                b & np.uint32(0xFFFF0000)
                            )
                else:
                    step = PIECE if group else width
                    for begin in range(ZERO, done, step):
                        left = right = scale * unit
                        if group:
                            left = scale_values[records[scales_at + begin // per_scale]]
                            middle = (begin + HALF_PIECE) // per_scale
                            right = scale_values[records[scales_at + middle]]
                            left *= unit
                            right *= unit
                        for i in range(step):
                            code = wide[begin + i]
                            if code_bits == EIGHT:
                                code = records[codes_at + begin + i]
                            bits[target + begin + i] = _total(
                                _number(code, is_float),
                                left if i < HALF_PIECE else right,
                                offset[at + begin + i],
                                is_float,
                                has_offset,
                            )
                for i in range(done, width):
                    byte = records[codes_at + ((i * code_bits) >> THREE)]
                    shift = np.uint8((i * code_bits) & np.uint64(7))
                    code = np.uint8(byte >> shift) & code_mask
                    scale_at = scales_at + i // per_scale
                    scale = _scale(records, scale_at, scale_bytes, scale_values)
                    term = at + i
                    if code_bits == ONE:
                        term = (term >> ONE) + (term & ONE) * (size >> ONE)
                    bits[target + i] = _careful_sum(
                        values[code], scale, offset[term], scale_bytes == ONE
                    )

    decode.__qualname__ = f"decode_{form.name}"
    return kernel(
        input_array(types.uint8),
        _MOVES,
        input_array(types.float32),
        output_array(types.uint16),
        _PAIR,
    )(decode)


@summing
def _products(
    words: U16, a_at: Index, b_at: Index, query: F32, first: Index, width: Index
) -> Any:
    """Return the dot products of 2 tokens, at the positions `a_at` and `b_at` of
    `words`, with each of 4 query vectors, grouped by query vector.

    `first` is the position of the first query vector in `query`.
    """
    # The tokens are a and b, and the query vectors are p, q, r and s. `as_` is the
    # product of a and s, because `as` is a keyword. Eight sums keep two units for
    # multiplication busy, whose results take four cycles.
    ap = aq = ar = as_ = bp = bq = br = bs = np.float32(0)
    for i in range(width):
        a = _bf16(words[a_at + i])
        b = _bf16(words[b_at + i])
        p = query[first + i]
        q = query[first + width + i]
        r = query[first + TWO * width + i]
        s = query[first + THREE * width + i]
        ap = ap + a * p
        aq = aq + a * q
        ar = ar + a * r
        as_ = as_ + a * s
        bp = bp + b * p
        bq = bq + b * q
        br = br + b * r
        bs = bs + b * s
    return (ap, bp), (aq, bq), (ar, br), (as_, bs)


@kernel(
    input_array(types.uint16),
    types.Array(types.int64, 1, "C", readonly=True),
    input_array(types.float32),
    output_array(types.float32),
    _TRIPLE,
)
def max_sim(
    words: U16, offsets: NDArray[np.int64], query: F32, scores: F32, sizes: Triple
) -> None:
    """Write the MaxSim of a query and each block to `scores` [k].

    Args:
        words: memory with the bfloat16 blocks.
        offsets: position of each block in `words`, int64 [k].
        query: the query vectors, and zeros up to a multiple of 4 vectors.
        scores: output. The score of a block that contains NaN is NaN.
        sizes: (tokens per block, values per token, number of query vectors)
    """
    tokens, width, vectors = sizes
    last = tokens - ONE
    best = np.empty(np.uint64(len(query)) // width, dtype=np.float32)
    for block in range(len(offsets)):
        best[:] = -np.inf
        start = np.uint64(offsets[block])
        # If the number of tokens is odd, the last token occurs again, which does not
        # change the maximum.
        for token in range(ZERO, tokens, TWO):
            a_at = start + token * width
            b_at = start + min(token + ONE, last) * width
            for row in range(ZERO, np.uint64(len(best)), FOUR):
                for vector, products in enumerate(
                    _products(words, a_at, b_at, query, row * width, width)
                ):
                    largest = best[row + np.uint64(vector)]
                    # a product that is NaN becomes the maximum and stays the maximum
                    for product in products:
                        largest = (
                            largest
                            if product <= largest or largest != largest
                            else product
                        )
                    best[row + np.uint64(vector)] = largest
        score = np.float32(0)
        for row in range(vectors):
            score += best[row]
        scores[block] = score
