"""Compiled kernels of the codecs. A codec imports this module and Numba at the first
conversion.

A kernel runs on the calling thread and releases the GIL, so a caller may run one kernel
on several threads at once. Each kernel takes flat arrays and some of these arguments:

- `geometry`: (values per block, values per token, values per scale)
- `span`: (start, stop), a half-open range of blocks to encode, or of items of `moves`
  to decode
- `moves`: (offsets, blocks); the record at byte `offsets[i]` is decoded to block
  `blocks[i]` of the output

All kernels and their helpers are in this module, because Numba's cache detects changes
only in the file of the kernel. Indices are unsigned, so that LLVM can vectorise the
loops. A helper takes an array and the index of the first element instead of a slice,
because Numba would count the references to the slice, which costs time.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.kernel_compiler import (
    count_ones,
    fused,
    inlined,
    input_array,
    kernel,
    output_array,
    prefer_wide_vectors,
    summing,
    types,
    unordered,
)

U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
F32: TypeAlias = NDArray[np.float32]
Moves: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
Index: TypeAlias = np.uint64
Geometry: TypeAlias = tuple[Index, Index, Index]
Span: TypeAlias = tuple[Index, Index]

ZERO = np.uint64(0)
ONE = np.uint64(1)
TWO = np.uint64(2)
THREE = np.uint64(3)
FOUR = np.uint64(4)
EIGHT = np.uint64(8)
NO_BITS = np.uint16(0)
# all bits of a bfloat16 except the sign
MAGNITUDE_BITS = np.uint16(0x7FFF)
BF16_FRACTION_BITS = np.uint16(7)
INFINITY_BITS = np.uint16(0x7F80)
NAN_BITS = np.uint16(0x7FC0)
# number of iterations of the inner loops, constant so that LLVM vectorises the loops
PIECE = np.uint64(32)
# number of pairs of offset values that stay in the first-level cache
OFFSET_PIECE = np.uint64(2048)
# see `codecs.formats`
NAN_SCALE = np.uint16(0xFFFF)
NAN_CODE = np.uint8(0xFF)
LARGE_LEVEL = 3.34375
E4M3_BIAS = np.uint16(7)
# bits of 2 ** 126
LARGEST_SCALE = np.uint16(0x7E80)
# A word of 16 bits times this number is four copies of the word in 64 bits.
FOUR_TIMES = np.uint64(0x0001000100010001)
# Scale exponents from this number on may give products outside the bfloat16 range. So
# may negative exponents, which are larger than this number when read as unsigned.
EXTREME_EXPONENT = np.uint16(240)

_GEOMETRY = types.UniTuple(types.uint64, 3)
_MOVES = types.UniTuple(types.Array(types.int64, 1, "C"), 2)
_SPAN = types.UniTuple(types.uint64, 2)


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
def _largest_magnitude(bits: U16, first: Index, count: Index) -> int:
    """Return the bits of the largest magnitude in `bits[first:first + count]`. NaN
    is larger than infinity.
    """
    largest = NO_BITS
    for i in range(count):
        largest = max(largest, np.uint16(bits[first + i] & MAGNITUDE_BITS))
    return int(largest)


@inlined
def _choose_scales(
    bits: U16,
    first: Index,
    width: Index,
    group: Index,
    scale_codes: U8,
    records: U8,
    scales_at: Index,
) -> bool:
    """Write the scale code of each group of a token to `records`. Return True if a
    scale is NaN.
    """
    has_nan = False
    for index in range(width // group):
        code = scale_codes[_largest_magnitude(bits, first + index * group, group)]
        has_nan |= bool(code == NAN_CODE)
        records[scales_at + index] = code
    return has_nan


@inlined
def _spread(
    records: U8, scales_at: Index, group: Index, scale_values: F32, spread: F32
) -> None:
    """Write the scale of each value of a token to `spread`, float32 [width]."""
    for index in range(np.uint64(len(spread)) // group):
        value = scale_values[records[scales_at + index]]
        for i in range(group):
            spread[index * group + i] = value


@inlined
def _shifted(number: np.uint16, exponent: np.uint16) -> Any:
    """Return the E4M3 code of the bfloat16 `number` divided by a scale, whose exponent
    is in the exponent bits of `exponent`. The code must be zero or normal.
    """
    magnitude = np.uint16(number & MAGNITUDE_BITS)
    field = np.uint16(magnitude - exponent) if magnitude else NO_BITS
    even = np.uint16(field >> np.uint16(4)) & np.uint16(1)
    code = min(
        np.uint16(np.uint16(field + np.uint16(7) + even) >> np.uint16(4)),
        np.uint16(0x7E),
    )
    return np.uint8(
        code | np.uint16(np.uint16(number >> np.uint16(8)) & np.uint16(0x80))
    )


@inlined
def _magnitude(number: np.uint16) -> Any:
    """Return |number| as a float32, limited to 15 x 2**124. Rounding to the few
    significant bits of E4M3 could turn larger numbers into 2**128, which is infinite in
    bfloat16.
    """
    return _bf16(min(np.uint16(number & MAGNITUDE_BITS), np.uint16(0x7F70)))


@inlined
def _rounded_e4m3(number: np.uint16, factor: np.float32) -> Any:
    """Return the E4M3 code of number x factor. The code may be subnormal."""
    code = _minifloat_code(_magnitude(number) * factor, 3, 7, 448.0)
    return np.uint8(code | (np.uint32(number >> np.uint16(8)) & np.uint32(0x80)))


@inlined
def _extremes(bits: U16, first: Index, count: Index) -> Any:
    """Return (largest, smallest - 1): the bits of the largest magnitude, and the bits
    of the smallest nonzero magnitude minus 1, as integers. The subtraction turns zero
    into 0xFFFF, so that zeros are never the smallest.
    """
    largest = NO_BITS
    below_smallest = np.uint16(0xFFFF)
    for i in range(count):
        magnitude = np.uint16(bits[first + i] & MAGNITUDE_BITS)
        largest = max(largest, magnitude)
        below_smallest = min(below_smallest, np.uint16(magnitude - np.uint16(1)))
    return largest, below_smallest


@inlined
def _fill_nan_groups(
    records: U8, codes_at: Index, scales_at: Index, groups: Index, size: Index
) -> None:
    """Set all codes of a group to 0xFF if the scale of the group is NaN."""
    for index in range(groups):
        if records[scales_at + index] == NAN_CODE:
            for i in range(size):
                records[codes_at + index * size + i] = NAN_CODE


_GROUP_ENCODER = (
    input_array(types.uint16),
    input_array(types.uint8),
    input_array(types.float32),
    output_array(types.uint8),
    _GEOMETRY,
    _SPAN,
)


@kernel(*_GROUP_ENCODER)
def encode_e4m3(
    bits: U16,
    scale_codes: U8,
    inverse_scales: F32,
    records: U8,
    geometry: Geometry,
    span: Span,
) -> None:
    """Encode bfloat16 values to E4M3 codes and E8M0 scales, one per token.

    Args:
        bits: bits of the bfloat16 values.
        scale_codes: [32768], scale code of a group, indexed by the bits of the largest
            magnitude in the group.
        inverse_scales: [256], 1 / scale for each scale code.
        geometry: (values per block, values per token, values per scale).
        span: (start, stop), half-open range of blocks to encode.
    """
    values, width, group = geometry
    start, stop = span
    for block in range(start, stop):
        codes_at = block * (values + values // group)
        scales_at = codes_at + values
        for first in range(block * values, (block + ONE) * values, width):
            largest, below_smallest = _extremes(bits, first, width)
            scale = scale_codes[int(largest)]
            records[scales_at] = scale
            exponent = np.uint16(np.uint16(scale) - E4M3_BIAS)
            shift = np.uint16(exponent << BF16_FRACTION_BITS)
            if scale == NAN_CODE:
                for i in range(width):
                    records[codes_at + i] = NAN_CODE
            # the second condition means that a value needs a subnormal code
            elif (
                exponent >= EXTREME_EXPONENT
                or np.int64(below_smallest) + 1 < np.int64(shift) + 0x80
            ):
                for i in range(width):
                    records[codes_at + i] = _rounded_e4m3(
                        bits[first + i], inverse_scales[scale]
                    )
            else:
                for i in range(width):
                    records[codes_at + i] = _shifted(bits[first + i], shift)
            codes_at += width
            scales_at += ONE


@kernel(*_GROUP_ENCODER)
def encode_e2m1(
    bits: U16,
    scale_codes: U8,
    scale_values: F32,
    records: U8,
    geometry: Geometry,
    span: Span,
) -> None:
    """Encode bfloat16 values to E2M1 codes, two per byte, and one-byte scales.

    `scale_values` [256] contains the value of each scale code. For the other arguments,
    see `encode_e4m3`.
    """
    values, width, group = geometry
    half = width >> ONE
    divisors = np.empty(width, dtype=np.float32)
    nibbles = np.empty(width, dtype=np.uint8)
    pairs = nibbles.view(np.uint16)
    start, stop = span
    for block in range(start, stop):
        codes_at = block * ((values >> ONE) + values // group)
        scales_at = codes_at + (values >> ONE)
        for first in range(block * values, (block + ONE) * values, width):
            has_nan = _choose_scales(
                bits, first, width, group, scale_codes, records, scales_at
            )
            _spread(records, scales_at, group, scale_values, divisors)
            for i in range(width):
                number = bits[first + i]
                code = _minifloat_code(_magnitude(number) / divisors[i], 1, 1, 6.0)
                nibbles[i] = np.uint8(
                    code | (np.uint32(number >> np.uint16(12)) & np.uint32(0x08))
                )
            for i in range(half):
                records[codes_at + i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))
            if has_nan:
                _fill_nan_groups(
                    records, codes_at, scales_at, width // group, group >> ONE
                )
            codes_at += half
            scales_at += width // group


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


@inlined
def _int8_code(number: np.float32, scale: np.float32) -> Any:
    """Return the integer nearest to number / scale."""
    # The last bit of this number has the weight 1. Adding the number therefore rounds
    # to an integer, which is in the low bits of the sum.
    shifter = np.float32(1.5 * 2.0**23)
    quotient = min(max(number / scale, np.float32(-127)), np.float32(127))
    return np.uint8(_bits(quotient + shifter))


@inlined
def _subtract(
    bits: U16, first: Index, offset: F32, at: Index, residuals: F32
) -> np.uint16:
    """Write a token minus its offset to `residuals`. Return the bits of the largest
    magnitude, rounded to bfloat16.
    """
    largest = np.uint32(0)
    for i in range(np.uint64(len(residuals))):
        number = _bf16(bits[first + i]) - offset[at + i]
        residuals[i] = number
        largest = max(largest, np.uint32(_bits(number) & np.uint32(0x7FFFFFFF)))
    even = np.uint32(largest >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(largest + np.uint32(0x7FFF) + even) >> np.uint32(16))


@kernel(
    input_array(types.uint16),
    input_array(types.float32),
    input_array(types.uint16),
    output_array(types.uint8),
    _GEOMETRY,
    _SPAN,
)
def encode_int8(
    bits: U16,
    offset: F32,
    scale_bits: U16,
    records: U8,
    geometry: Geometry,
    span: Span,
) -> None:
    """Encode bfloat16 values to integers and bfloat16 scales.

    Args:
        offset: block that is subtracted, [m * d], or empty.
        scale_bits: [32768], bits of a token's scale, indexed by the bits of the token's
            largest magnitude.
    """
    values, width, _ = geometry
    residuals = np.empty(width, dtype=np.float32)
    start, stop = span
    for block in range(start, stop):
        codes_at = block * (values + TWO * (values // width))
        scale_at = codes_at + values
        for at in range(ZERO, values, width):
            first = block * values + at
            if len(offset):
                scale = scale_bits[_subtract(bits, first, offset, at, residuals)]
                divisor = _bf16(scale)
                for i in range(width):
                    records[codes_at + i] = _int8_code(residuals[i], divisor)
            else:
                scale = scale_bits[_largest_magnitude(bits, first, width)]
                divisor = _bf16(scale)
                for i in range(width):
                    number = _bf16(bits[first + i])
                    records[codes_at + i] = _int8_code(number, divisor)
            _write_word(records, scale_at, scale)
            if scale == NAN_SCALE:
                for i in range(width):
                    records[codes_at + i] = NAN_CODE
            codes_at += width
            scale_at += TWO


def _magnitude_sum(bits: U16, first: Index, width: Index) -> float:
    """Return the sum of the magnitudes of a token."""
    total = 0.0
    for i in range(width):
        total += np.float64(_bf16(np.uint16(bits[first + i] & MAGNITUDE_BITS)))
    return total


_sum_in_order = inlined(_magnitude_sum)
_sum_in_any_order = summing(_magnitude_sum)


@inlined
def _is_sum_exact(bits: U16, first: Index, width: Index) -> bool:
    """Return True if a float64 holds the sum of any magnitudes of a token exactly."""
    largest, below_smallest = _extremes(bits, first, width)
    exponents = (np.int64(largest) >> 7) - ((np.int64(below_smallest) + 1) >> 7)
    # The sum of at most 2 ** 16 values needs the 8 bits of a magnitude, one bit for
    # each step between the exponents, and 16 bits for carries. A float64 has 53 bits.
    return bool(exponents <= 53 - 8 - 16 and width <= 1 << 16)


@kernel(
    input_array(types.uint16),
    output_array(types.uint8),
    types.uint64,
    types.float64,
    _GEOMETRY,
    _SPAN,
)
def encode_signs(
    bits: U16,
    records: U8,
    code_bits: Index,
    threshold: float,
    geometry: Geometry,
    span: Span,
) -> None:
    """Encode bfloat16 values to codes of one or two bits, and one bfloat16 scale per
    token.

    The low bit of a code is the sign. The high bit is set if the magnitude exceeds
    `threshold` times the root mean square of the token, and its level is then
    `LARGE_LEVEL`.
    """
    values, width, _ = geometry
    per_byte = EIGHT // code_bits
    size = width // per_byte
    start, stop = span
    for block in range(start, stop):
        codes_at = block * (values // width) * (size + TWO)
        scale_at = codes_at + values // per_byte
        for first in range(block * values, (block + ONE) * values, width):
            limit = np.inf
            if code_bits == TWO:
                squares = 0.0
                for i in range(width):
                    number = np.float64(
                        _bf16(np.uint16(bits[first + i] & MAGNITUDE_BITS))
                    )
                    squares += number * number
                limit = threshold * math.sqrt(squares / width)
            # sum of the small magnitudes, sum of the large ones, number of large ones
            small = large = larger = 0.0
            if code_bits == ONE:
                # an exact sum is the same in any order, so it can be vectorised
                if _is_sum_exact(bits, first, width):
                    small = _sum_in_any_order(bits, first, width)
                else:
                    small = _sum_in_order(bits, first, width)
            for i in range(size):
                code = np.uint32(0)
                # The two loops have constant lengths, so LLVM unrolls them.
                if code_bits == ONE:
                    for bit in range(EIGHT):
                        word = bits[first + (i << THREE) + bit]
                        sign = np.uint32(word >> np.uint16(15))
                        code |= np.uint32(sign << np.uint32(bit))
                else:
                    for part in range(FOUR):
                        word = bits[first + (i << TWO) + part]
                        number = np.float64(_bf16(np.uint16(word & MAGNITUDE_BITS)))
                        is_large = number > limit
                        small += 0.0 if is_large else number
                        large += number if is_large else 0.0
                        larger += 1.0 if is_large else 0.0
                        sign = np.uint32(word >> np.uint16(15))
                        pair = sign | np.uint32(is_large) << np.uint32(1)
                        code |= np.uint32(pair << np.uint32(part << ONE))
                records[codes_at + i] = np.uint8(code)
            weight = (width - larger) + LARGE_LEVEL * LARGE_LEVEL * larger
            scale = _rounded_bf16(np.float32((small + LARGE_LEVEL * large) / weight))
            if scale >= INFINITY_BITS:
                scale = NAN_SCALE
                for i in range(size):
                    records[codes_at + i] = NAN_CODE
            elif code_bits == TWO:
                # with a larger scale, scale x LARGE_LEVEL would be infinite
                scale = min(scale, LARGEST_SCALE)
            _write_word(records, scale_at, scale)
            codes_at += size
            scale_at += TWO


@kernel(
    input_array(types.uint8),
    _MOVES,
    input_array(types.uint64),
    output_array(types.uint64),
    _GEOMETRY,
    _SPAN,
)
def decode_signs(
    records: U8, moves: Moves, signs: U64, quads: U64, geometry: Geometry, span: Span
) -> None:
    """Decode sign bits and bfloat16 scales to words of four bfloat16 values.

    `signs` [256 * 2] contains, for each byte of eight signs, two words with the sign
    bits of four bfloat16 values each.
    """
    values, width, _ = geometry
    offsets, blocks = moves
    start, stop = span
    for move in range(start, stop):
        codes_at = np.uint64(offsets[move])
        scale_at = codes_at + (values >> THREE)
        quad = (np.uint64(blocks[move]) * values) >> TWO
        for _ in range(values // width):
            word = _read_word(records, scale_at)
            is_nan = np.uint16(word & MAGNITUDE_BITS) > INFINITY_BITS
            kept = ZERO if is_nan else np.uint64(0xFFFFFFFFFFFFFFFF)
            four = np.uint64(NAN_BITS if is_nan else word) * FOUR_TIMES
            for i in range(width >> THREE):
                entry = np.uint64(records[codes_at + i]) << ONE
                quads[quad] = four ^ (signs[entry] & kept)
                quads[quad + ONE] = four ^ (signs[entry | ONE] & kept)
                quad += TWO
            codes_at += width >> THREE
            scale_at += TWO


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
def _pair(low: np.uint32, high: np.uint32) -> Any:
    """Return a word with the upper halves of `low` and `high`."""
    return np.uint32(low >> np.uint32(16)) | np.uint32(high & np.uint32(0xFFFF0000))


@kernel(
    input_array(types.uint32),
    input_array(types.float32),
    input_array(types.float32),
    output_array(types.uint32),
)
def subtract_offset(pairs: U32, even: F32, odd: F32, residuals: U32) -> None:
    """Write blocks minus an offset to `residuals`.

    Each word of `pairs` and of `residuals` contains two consecutive bfloat16 values.
    `even` and `odd` [m * d / 2] are the values of the offset with even and with odd
    indices.
    """
    prefer_wide_vectors()
    count = np.uint64(len(even))
    one = np.float32(1)
    # All blocks are processed for one part of the offset before the next part, so that
    # the part stays in the first-level cache.
    for begin in range(ZERO, count, OFFSET_PIECE):
        end = min(begin + OFFSET_PIECE, count)
        for first in range(ZERO, np.uint64(len(pairs)), count):
            for i in range(begin, end):
                pair = pairs[first + i]
                low = np.uint32(pair << np.uint32(16)).view(np.float32)
                high = np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)
                residuals[first + i] = _pair(
                    _rounded_sum(low, one, -even[i]), _rounded_sum(high, one, -odd[i])
                )


_DECODER = (
    input_array(types.uint8),
    _MOVES,
    input_array(types.float32),
    output_array(types.uint16),
    _GEOMETRY,
    _SPAN,
)


@inlined
def _e4m3(code: np.uint8) -> Any:
    """Return the value of an E4M3 code times 2 ** -120. The code must not be NaN."""
    word = np.uint32(np.int32(np.int32(np.int8(code)) << np.int32(20)))
    return np.uint32(word & np.uint32(0x87F00000)).view(np.float32)


@kernel(*_DECODER)
def decode_int8(
    records: U8, moves: Moves, offset: F32, bits: U16, geometry: Geometry, span: Span
) -> None:
    """Decode integers and bfloat16 scales, and add `offset` [m * d].

    The loops decode the same token of four blocks before the next token, so that the
    offset of the token stays in the processor's cache.
    """
    prefer_wide_vectors()
    values, width, _ = geometry
    offsets, blocks = moves
    start, stop = span
    for first in range(start, stop, FOUR):
        for token in range(values // width):
            at = token * width
            for move in range(first, min(first + FOUR, stop)):
                record = np.uint64(offsets[move])
                target = np.uint64(blocks[move]) * values + at
                scale = _bf16(_read_word(records, record + values + TWO * token))
                for i in range(width):
                    code = np.float32(np.int8(records[record + at + i]))
                    bits[target + i] = _rounded_bf16(code * scale + offset[at + i])


@kernel(*_DECODER)
def decode_levels(
    records: U8, moves: Moves, offset: F32, bits: U16, geometry: Geometry, span: Span
) -> None:
    """Decode codes of two bits and bfloat16 scales like `decode_int8`."""
    prefer_wide_vectors()
    values, width, _ = geometry
    size = width >> TWO
    # the codes of a token, one code per byte
    codes = np.empty(width, dtype=np.uint8)
    fours = codes.view(np.uint32)
    offsets, blocks = moves
    start, stop = span
    for first in range(start, stop, FOUR):
        for token in range(values // width):
            at = token * width
            for move in range(first, min(first + FOUR, stop)):
                record = np.uint64(offsets[move])
                target = np.uint64(blocks[move]) * values + at
                word = _read_word(records, record + (values >> TWO) + TWO * token)
                is_nan = np.uint16(word & MAGNITUDE_BITS) > INFINITY_BITS
                scale = _bf16(NAN_BITS if is_nan else word)
                # distribute the four codes of a byte to the four bytes of a word
                for i in range(size):
                    four = np.uint32(records[record + size * token + i])
                    four |= np.uint32(four << np.uint32(12))
                    four |= np.uint32(four << np.uint32(6))
                    fours[i] = four & np.uint32(0x03030303)
                for i in range(width):
                    code = np.uint32(codes[i])
                    level = np.float32(LARGE_LEVEL if code & np.uint32(2) else 1)
                    sign = np.uint32(code << np.uint32(31))
                    level = np.uint32(_bits(level) | sign).view(np.float32)
                    bits[target + i] = _sum(level, scale, offset[at + i])


@inlined
def _is_plain(records: U8, codes_at: Index, values: Index, groups: Index) -> bool:
    """Return True if `decode_e4m3` can compute with the codes of a record instead of
    looking up products.

    This is the case if no E4M3 code is NaN, and if all products code x scale and all
    factors 2**120 x scale are exact bfloat16 values.
    """
    highest = np.uint8(0)
    for i in range(values):
        highest = max(highest, np.uint8(records[codes_at + i] << np.uint8(1)))
    farthest = np.uint8(0)
    for i in range(values, values + groups):
        farthest = max(farthest, np.uint8(records[codes_at + i] - np.uint8(3)))
    return bool(highest < 0xFE and farthest <= 131)


@kernel(*_DECODER, input_array(types.uint16))
def decode_e4m3(
    records: U8,
    moves: Moves,
    offset: F32,
    bits: U16,
    geometry: Geometry,
    span: Span,
    table: U16,
) -> None:
    """Decode E4M3 codes and E8M0 scales like `decode_int8`.

    `table` [256 scales x 256 codes] contains the bfloat16 bits of each product scale x
    code.
    """
    prefer_wide_vectors()
    values, width, group = geometry
    groups = width // group
    offsets, blocks = moves
    start, stop = span
    for first in range(start, stop, FOUR):
        last = min(first + FOUR, stop)
        plain = True
        for move in range(first, last):
            plain &= _is_plain(
                records, np.uint64(offsets[move]), values, values // group
            )
        for token in range(ZERO, values, width):
            for move in range(first, last):
                codes_at = np.uint64(offsets[move]) + token
                scales_at = np.uint64(offsets[move]) + values + token // group
                target = np.uint64(blocks[move]) * values + token
                for index in range(groups):
                    scale = records[scales_at + index]
                    begin = index * group
                    end = begin + group
                    if plain:
                        # 2 ** 120 x scale, because `_e4m3` returns values x 2 ** -120
                        exponent = np.uint32(np.uint32(scale) + np.uint32(120))
                        factor = np.uint32(exponent << np.uint32(23)).view(np.float32)
                        # LLVM vectorises loops of constant length best
                        whole = end - group % PIECE
                        for piece in range(begin, whole, PIECE):
                            for i in range(piece, piece + PIECE):
                                number = _e4m3(records[codes_at + i])
                                bits[target + i] = _sum(
                                    number, factor, offset[token + i]
                                )
                        for i in range(whole, end):
                            number = _e4m3(records[codes_at + i])
                            bits[target + i] = _sum(number, factor, offset[token + i])
                    else:
                        entry = np.uint64(scale) << EIGHT
                        for i in range(begin, end):
                            product = table[entry | np.uint64(records[codes_at + i])]
                            bits[target + i] = _sum(
                                _bf16(product), np.float32(1), offset[token + i]
                            )


@inlined
def _e2m1(magnitude: np.uint32, sign: np.uint32) -> Any:
    """Return the value of an E2M1 code from the bits 22 to 24 of `magnitude` and bit
    31 of `sign`.
    """
    # Computing with subnormal float32 numbers would be slow, so a constant is added to
    # the exponent. The magnitudes from 1 on are then right. 0 and 0.5 become 0.5 and
    # 0.75, and 2 x - 1 restores them.
    bits = np.uint32(magnitude & np.uint32(0x01C00000))
    normal = np.uint32(bits + np.uint32(0x3F000000)).view(np.float32)
    subnormal = np.float32(normal + normal) - np.float32(1)
    value = subnormal if subnormal < normal else normal
    negative = np.uint32(sign & np.uint32(0x80000000))
    return np.uint32(_bits(value) | negative).view(np.float32)


@inlined
def _e2m1_pair(byte: int, scale: np.float32, even: np.float32, odd: np.float32) -> Any:
    """Return value x scale + offset for the two values of a byte, as a word of two
    bfloat16 values. `even` and `odd` are the two offsets.
    """
    code = np.uint32(byte)
    low = _e2m1(np.uint32(code << np.uint32(22)), np.uint32(code << np.uint32(28)))
    high = _e2m1(np.uint32(code << np.uint32(18)), np.uint32(code << np.uint32(24)))
    return _pair(_rounded_sum(low, scale, even), _rounded_sum(high, scale, odd))


_PAIR_DECODER = (
    input_array(types.uint8),
    _MOVES,
    input_array(types.float32),
    input_array(types.float32),
    output_array(types.uint32),
    _GEOMETRY,
    _SPAN,
)


@kernel(*_PAIR_DECODER, input_array(types.float32))
def decode_e2m1(
    records: U8,
    moves: Moves,
    even: F32,
    odd: F32,
    pairs: U32,
    geometry: Geometry,
    span: Span,
    scale_values: F32,
) -> None:
    """Decode E2M1 codes and one-byte scales like `decode_int8`, to pairs of bfloat16
    values.

    `even` and `odd` [m * d / 2] are the values of the offset with even and with odd
    indices. `scale_values` [256] contains the value of each scale code.
    """
    prefer_wide_vectors()
    values, width, group = geometry
    size = width >> ONE
    whole = size - size % PIECE
    # number of scales of the 64 values of a piece, at most four
    scales = TWO * PIECE // group
    # A piece has four quarters of eight bytes. These are the distances of the scales of
    # the second and the third quarter from the first scale. The sum of both is the
    # distance of the scale of the fourth quarter.
    second = scales >> TWO
    third = scales >> ONE
    offsets, blocks = moves
    start, stop = span
    for first in range(start, stop, FOUR):
        for token in range(values // width):
            at = token * size
            for move in range(first, min(first + FOUR, stop)):
                codes_at = np.uint64(offsets[move]) + at
                scales_at = np.uint64(offsets[move]) + (values >> ONE)
                scales_at += token * (width // group)
                target = np.uint64(blocks[move]) * (values >> ONE) + at
                for piece in range(ZERO, whole, PIECE):
                    a = scale_values[records[scales_at]]
                    b = scale_values[records[scales_at + second]]
                    c = scale_values[records[scales_at + third]]
                    d = scale_values[records[scales_at + second + third]]
                    scales_at += scales
                    for i in range(PIECE):
                        left = a if i < EIGHT else b
                        right = c if i < THREE * EIGHT else d
                        scale = left if i < TWO * EIGHT else right
                        byte = piece + i
                        pairs[target + byte] = _e2m1_pair(
                            records[codes_at + byte],
                            scale,
                            even[at + byte],
                            odd[at + byte],
                        )
                for byte in range(whole, size):
                    index = (byte - whole) * TWO // group
                    pairs[target + byte] = _e2m1_pair(
                        records[codes_at + byte],
                        scale_values[records[scales_at + index]],
                        even[at + byte],
                        odd[at + byte],
                    )


# bits of the values with even and with odd indices in two words of 32 bits
EVEN_BITS = np.tile(np.uint32(1) << np.arange(0, 32, 2, dtype=np.uint32), 2)
ODD_BITS = EVEN_BITS << np.uint32(1)


@inlined
def _signed_sum(word: int, mask: int, scales: Any, offset: np.float32) -> Any:
    """Return the sum of an offset and the scale that a sign bit selects."""
    number = scales[1] if np.uint32(word & mask) else scales[0]
    return _rounded_sum(number, np.float32(1), offset)


@kernel(*_PAIR_DECODER)
def decode_sign_sums(
    records: U8,
    moves: Moves,
    even: F32,
    odd: F32,
    pairs: U32,
    geometry: Geometry,
    span: Span,
) -> None:
    """Decode sign bits and bfloat16 scales, and add an offset, like `decode_e2m1`."""
    values, width, _ = geometry
    size = width >> THREE
    whole = size - size % EIGHT
    offsets, blocks = moves
    start, stop = span
    for first in range(start, stop, FOUR):
        for token in range(values // width):
            at = token * (width >> ONE)
            for move in range(first, min(first + FOUR, stop)):
                record = np.uint64(offsets[move])
                codes_at = record + token * size
                word = _read_word(records, record + (values >> THREE) + TWO * token)
                is_nan = np.uint16(word & MAGNITUDE_BITS) > INFINITY_BITS
                # the values that + and - decode to
                plus = _bf16(NAN_BITS if is_nan else word)
                scales = (plus, plus if is_nan else -plus)
                target = np.uint64(blocks[move]) * (values >> ONE) + at
                for byte in range(ZERO, whole, EIGHT):
                    left = _read_long(records, codes_at + byte)
                    right = _read_long(records, codes_at + byte + FOUR)
                    pair = byte << TWO
                    for i in range(PIECE):
                        bits = left if i < TWO * EIGHT else right
                        pairs[target + pair + i] = _pair(
                            _signed_sum(
                                bits, EVEN_BITS[i], scales, even[at + pair + i]
                            ),
                            _signed_sum(bits, ODD_BITS[i], scales, odd[at + pair + i]),
                        )
                for rest in range(whole << TWO, width >> ONE):
                    bits = np.uint32(records[codes_at + (rest >> TWO)])
                    bit = rest & THREE
                    pairs[target + rest] = _pair(
                        _signed_sum(bits, EVEN_BITS[bit], scales, even[at + rest]),
                        _signed_sum(bits, ODD_BITS[bit], scales, odd[at + rest]),
                    )


@summing
def _products(words: U16, tokens: Any, query: F32, first: Index, width: Index) -> Any:
    """Return the dot products of 4 tokens with each of 4 query vectors, grouped by
    query vector.

    `tokens` has the positions of the 4 tokens in `words`. `first` is the position of
    the first query vector in `query`.
    """
    # The tokens are a, b, c and d, and the query vectors are p, q, r and s. `as_` is
    # the product of a and s, because `as` is a keyword.
    at, bt, ct, dt = tokens
    ap = aq = ar = as_ = bp = bq = br = bs = np.float32(0)
    cp = cq = cr = cs = dp = dq = dr = ds = np.float32(0)
    for i in range(width):
        a = _bf16(words[at + i])
        b = _bf16(words[bt + i])
        c = _bf16(words[ct + i])
        d = _bf16(words[dt + i])
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
        cp = cp + c * p
        cq = cq + c * q
        cr = cr + c * r
        cs = cs + c * s
        dp = dp + d * p
        dq = dq + d * q
        dr = dr + d * r
        ds = ds + d * s
    return (ap, bp, cp, dp), (aq, bq, cq, dq), (ar, br, cr, dr), (as_, bs, cs, ds)


@kernel(
    input_array(types.uint16),
    types.Array(types.int64, 1, "C", readonly=True),
    input_array(types.float32),
    output_array(types.float32),
    _GEOMETRY,
)
def max_sim(
    words: U16, offsets: NDArray[np.int64], query: F32, scores: F32, sizes: Geometry
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
        # If the number of tokens is no multiple of 4, the last token occurs again,
        # which does not change the maximum.
        for token in range(ZERO, tokens, FOUR):
            b = min(token + ONE, last)
            c = min(token + TWO, last)
            d = min(token + THREE, last)
            at = (
                start + token * width,
                start + b * width,
                start + c * width,
                start + d * width,
            )
            for row in range(ZERO, np.uint64(len(best)), FOUR):
                for vector, products in enumerate(
                    _products(words, at, query, row * width, width)
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


@unordered
def _largest(numbers: F32) -> Any:
    largest = np.float32(-np.inf)
    for number in numbers:
        largest = number if number > largest else largest
    return largest


@inlined
def _sum_of_negative(word: int, planes: U64, first: Index) -> Any:
    """Return the sum of those of 64 integers whose bit in `word` is 1.

    The integers have 9 bits in two's complement. Plane j, `planes[first + j]`, contains
    bit j of each integer. Bit 8 has the weight -256.
    """
    total = -(np.int64(count_ones(word & planes[first + EIGHT])) << 8)
    for j in range(8):
        total += np.int64(count_ones(word & planes[first + np.uint64(j)])) << j
    return total


@kernel(
    input_array(types.uint8),
    types.Array(types.int64, 1, "C", readonly=True),
    input_array(types.uint64),
    input_array(types.float32),
    input_array(types.float32),
    input_array(types.float32),
    output_array(types.float32),
    _GEOMETRY,
)
def max_sim_of_signs(
    records: U8,
    offsets: NDArray[np.int64],
    planes: U64,
    sums: F32,
    steps: F32,
    biases: F32,
    scores: F32,
    sizes: Geometry,
) -> None:
    """Write the MaxSim of a query and each record of sign bits to `scores`. The values
    of the query are rounded to integers of 9 bits.

    Args:
        offsets: byte offset of each record in `records`, int64 [k].
        planes: bits of the query's integers, [q * d / 64 * 9], see `_sum_of_negative`.
        sums: sum of the integers of each query vector, [q].
        steps: value of the integer 1 in each query vector, [q].
        biases: dot product of each query vector and each token of the offset, [q * m].
        sizes: (tokens per block, values per token, number of query vectors)
    """
    tokens, width, vectors = sizes
    words = width // np.uint64(64)
    signs = np.empty(words * tokens, dtype=np.uint64)
    scales = np.empty(tokens, dtype=np.float32)
    negative = np.empty(tokens, dtype=np.int64)
    products = np.empty(tokens, dtype=np.float32)
    for block in range(len(offsets)):
        at = np.uint64(offsets[block])
        for token in range(tokens):
            for word in range(words):
                low = np.uint64(_read_long(records, at))
                high = np.uint64(_read_long(records, at + FOUR))
                signs[word * tokens + token] = low | (high << np.uint64(32))
                at += EIGHT
        for token in range(tokens):
            scales[token] = _bf16(_read_word(records, at + TWO * token))
        score = np.float32(0)
        for vector in range(vectors):
            negative[:] = 0
            for word in range(words):
                first = (vector * words + word) * (EIGHT + ONE)
                for token in range(tokens):
                    negative[token] += _sum_of_negative(
                        signs[word * tokens + token], planes, first
                    )
            # The product with signs is the sum of all integers minus twice the sum of
            # the integers with a negative sign.
            for token in range(tokens):
                product = sums[vector] - np.float32(negative[token] << 1)
                product *= steps[vector] * scales[token]
                products[token] = product + biases[vector * tokens + token]
            score += _largest(products)
        for token in range(tokens):
            # the score becomes NaN if a scale is NaN
            score += np.float32(0) * scales[token]
        scores[block] = score
