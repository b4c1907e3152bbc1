"""Compiled kernels of the codecs. Importing this module imports Numba; the codecs do so when they first convert.

Every kernel takes flat arrays and runs on blocks [start, stop) without the GIL: callers bring their own threads.
Of a block's `shape` (values, width, group) the first is m x d, the second d, and the third how many numbers share
a scale. Decoders write block `places[i]` of `bits` from the record that begins at byte `starts[i]` of `records`.

Kernels have one signature each, so that processes which fill Numba's cache at once write the same files, and stand
in one module, because that cache notices changes of a kernel's own file only. Indices are unsigned, which spares
Numba's handling of negative ones and lets LLVM vectorise; parts of arrays are given by their first index and not
as slices, which Numba counts references of. Mind that an unsigned and a signed integer make a float in Numba.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
F32: TypeAlias = NDArray[np.float32]
Places: TypeAlias = NDArray[np.int64]
Index: TypeAlias = np.uint64
Shape: TypeAlias = tuple[Index, Index, Index]

types: Any = numba.types
_njit: Any = functools.partial(numba.njit, nogil=True, error_model="numpy")


class Kernel:
    """A function compiled for one signature when it is first called, and kept on disk where that is possible."""

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._signature = types.void(*arguments)

    def __call__(self, *arguments: Any) -> None:
        self._compiled(*arguments)

    @functools.cached_property
    def _compiled(self) -> Callable[..., None]:
        try:
            return self._compile(cache=True)
        except (RuntimeError, OSError):  # no folder to write to: a read-only installation and home
            return self._compile(cache=False)

    def _compile(self, *, cache: bool) -> Callable[..., None]:
        compiled: Callable[..., None] = _njit(self._signature, cache=cache)(self._function)
        return compiled


def _kernel(*arguments: Any) -> Callable[[Callable[..., None]], Kernel]:
    return lambda function: Kernel(function, arguments)


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = _njit(function)
    return compiled


def _input(number: Any) -> Any:
    return types.Array(number, 1, "C", readonly=True, aligned=False)


def _output(number: Any) -> Any:
    return types.Array(number, 1, "C", aligned=False)


_SHAPE = types.UniTuple(types.uint64, 3)
_PLACES = _input(types.int64)
_SPAN = (types.uint64, types.uint64)


@_inlined
def _float(bits: np.uint32) -> Any:
    return np.uint32(bits).view(np.float32)


@_inlined
def _bits(number: np.float32) -> Any:
    return np.float32(number).view(np.uint32)


@_inlined
def _bf16(bits: np.uint16) -> Any:
    return _float(np.uint32(np.uint32(bits) << np.uint32(16)))


@_inlined
def _rounded_bf16(number: np.float32) -> np.uint16:
    """Bits of the nearest bfloat16, ties to even; one NaN."""
    bits = _bits(number)
    even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return np.uint16(rounded) if number == number else np.uint16(0x7FC0)


@_inlined
def _minifloat_code(number: np.float32, fraction_bits: int, bias: int, largest: float) -> np.uint32:
    """Code of |number| in a `MiniFloat`, rounded to nearest even and saturated.

    Normal results are rounded in the bits of the float32. Subnormal ones are rounded by adding the float32 whose
    last bit has their weight; the low bits of the sum are the code.
    """
    magnitude = min(abs(number), np.float32(largest))
    bits = _bits(magnitude)
    dropped = np.uint32(23 - fraction_bits)
    even = np.uint32(bits >> dropped) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32((1 << (22 - fraction_bits)) - 1) + even) >> dropped
    normal = np.uint32(rounded - np.uint32((127 - bias) << fraction_bits))
    aligner = np.float32(2.0 ** (24 - fraction_bits - bias))
    subnormal = np.uint32(_bits(magnitude + aligner) - _bits(aligner))
    return subnormal if magnitude < np.float32(2.0 ** (1 - bias)) else normal


@_inlined
def _largest_magnitude(bits: U16, first: Index, count: Index) -> int:
    """Bits of the largest magnitude: bfloat16 bits are in the order of their numbers, infinity and NaN last."""
    largest = np.uint16(0)
    for place in range(count):
        largest = max(largest, np.uint16(bits[first + place] & np.uint16(0x7FFF)))
    return int(largest)


@_inlined
def _choose_scales(
    bits: U16, first: Index, width: Index, group: Index, scale_codes: U8, records: U8, scales_at: Index
) -> bool:
    """Write the scale code of each group of a token; whether one of them is NaN."""
    poisoned = False
    for index in range(width // group):
        code = scale_codes[_largest_magnitude(bits, first + index * group, group)]
        poisoned |= bool(code == np.uint8(0xFF))
        records[scales_at + index] = code
    return poisoned


@_inlined
def _spread(records: U8, scales_at: Index, group: Index, scale_values: F32, spread: F32) -> None:
    """The value of each scale code of a token, once for each number of its group."""
    for index in range(np.uint64(len(spread)) // group):
        value = scale_values[records[scales_at + index]]
        for place in range(group):
            spread[index * group + place] = value


@_inlined
def _scale_exponents(records: U8, scales_at: Index, group: Index, exponents: U16) -> bool:
    """What E8M0 scales add to exponent fields, E4M3's to bfloat16's; whether one could leave bfloat16's range."""
    extreme = False
    for index in range(np.uint64(len(exponents)) // group):
        exponent = np.uint16(np.uint16(records[scales_at + index]) - np.uint16(7))
        extreme |= bool(exponent >= np.uint16(240))
        for place in range(group):
            exponents[index * group + place] = np.uint16(exponent << np.uint16(7))
    return extreme


@_inlined
def _has_subnormal_codes(bits: U16, first: Index, exponents: U16) -> bool:
    """Whether a number of a token is subnormal in E4M3 under its power-of-two scale."""
    highest = np.uint16(0)
    for place in range(np.uint64(len(exponents))):
        magnitude = np.uint16(bits[first + place] & np.uint16(0x7FFF))
        above = np.uint16(np.uint16(magnitude - exponents[place]) - np.uint16(0x80))
        highest = max(highest, above if magnitude else np.uint16(0))
    return bool(highest > np.uint16(0x7FF - 0x80))


@_inlined
def _shifted(number: np.uint16, exponent: np.uint16) -> Any:
    """E4M3 code of a number over a power of two, zero or normal: its fields move into place and are rounded."""
    magnitude = np.uint16(number & np.uint16(0x7FFF))
    field = np.uint16(magnitude - exponent) if magnitude else np.uint16(0)
    even = np.uint16(field >> np.uint16(4)) & np.uint16(1)
    code = min(np.uint16(np.uint16(field + np.uint16(7) + even) >> np.uint16(4)), np.uint16(0x7E))
    return np.uint8(code | np.uint16(np.uint16(number >> np.uint16(8)) & np.uint16(0x80)))


@_inlined
def _magnitude(number: np.uint16) -> Any:
    """|number|, at most 15 x 2**124: E4M3 would round larger ones to 2**128, which is no bfloat16."""
    return _bf16(min(np.uint16(number & np.uint16(0x7FFF)), np.uint16(0x7F70)))


@_inlined
def _rounded_e4m3(number: np.uint16, factor: np.float32) -> Any:
    """E4M3 code of a number times the inverse of its scale, whatever they are."""
    code = _minifloat_code(_magnitude(number) * factor, 3, 7, 448.0)
    return np.uint8(code | (np.uint32(number >> np.uint16(8)) & np.uint32(0x80)))


@_inlined
def _extremes(bits: U16, first: Index, count: Index) -> Any:
    """(bits of the largest magnitude, bits of the smallest that is not zero less one, 65535 where all are zero)."""
    largest, below_smallest = np.uint16(0), np.uint16(0xFFFF)
    for place in range(count):
        magnitude = np.uint16(bits[first + place] & np.uint16(0x7FFF))
        largest = max(largest, magnitude)
        below_smallest = min(below_smallest, np.uint16(magnitude - np.uint16(1)))
    return largest, below_smallest


@_inlined
def _poison(records: U8, codes_at: Index, scales_at: Index, groups: Index, size: Index) -> None:
    """Set every byte of codes, `size` a group, of the groups of a token whose scale is NaN."""
    for index in range(groups):
        if records[scales_at + index] == np.uint8(0xFF):
            for place in range(size):
                records[codes_at + index * size + place] = np.uint8(0xFF)


_GROUP_ENCODER = (
    *(_input(types.uint16), _input(types.uint8), _input(types.float32)),
    *(_output(types.uint8), _SHAPE, *_SPAN),
)


@_kernel(*_GROUP_ENCODER)
def encode_e4m3(
    bits: U16, scale_codes: U8, inverse_scales: F32, records: U8, shape: Shape, start: Index, stop: Index
) -> None:
    """E4M3 codes, then E8M0 scales: `scale_codes` [32768] by bits of the largest magnitude; `inverse_scales` [256].

    Tokens without subnormal codes, nearly all, take a way without floating point, with the same result.
    """
    values, width, group = shape
    exponents = np.empty(width, dtype=np.uint16)
    factors = np.empty(width, dtype=np.float32)
    for block in range(start, stop):
        codes_at = block * (values + values // group)
        scales_at = codes_at + values
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            poisoned = _choose_scales(bits, first, width, group, scale_codes, records, scales_at)
            extreme = _scale_exponents(records, scales_at, group, exponents)
            if extreme or _has_subnormal_codes(bits, first, exponents):
                _spread(records, scales_at, group, inverse_scales, factors)
                for place in range(width):
                    records[codes_at + place] = _rounded_e4m3(bits[first + place], factors[place])
            else:
                for place in range(width):
                    records[codes_at + place] = _shifted(bits[first + place], exponents[place])
            if poisoned:
                _poison(records, codes_at, scales_at, width // group, group)
            codes_at += width
            scales_at += width // group


@_kernel(*_GROUP_ENCODER)
def encode_e4m3_tokens(
    bits: U16, scale_codes: U8, inverse_scales: F32, records: U8, shape: Shape, start: Index, stop: Index
) -> None:
    """`encode_e4m3` where the group is the token: one pass finds the scale and whether a code would be subnormal."""
    values, width, group = shape
    for block in range(start, stop):
        codes_at = block * (values + values // group)
        scales_at = codes_at + values
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            largest, below_smallest = _extremes(bits, first, width)
            scale = scale_codes[int(largest)]
            records[scales_at] = scale
            exponent = np.uint16(np.uint16(scale) - np.uint16(7))
            shift = np.uint16(exponent << np.uint16(7))
            if scale == np.uint8(0xFF):
                for place in range(width):
                    records[codes_at + place] = np.uint8(0xFF)
            elif exponent >= np.uint16(240) or np.int64(below_smallest) + 1 < np.int64(shift) + 0x80:
                for place in range(width):
                    records[codes_at + place] = _rounded_e4m3(bits[first + place], inverse_scales[scale])
            else:
                for place in range(width):
                    records[codes_at + place] = _shifted(bits[first + place], shift)
            codes_at += width
            scales_at += np.uint64(1)


@_kernel(*_GROUP_ENCODER)
def encode_e2m1(
    bits: U16, scale_codes: U8, scale_values: F32, records: U8, shape: Shape, start: Index, stop: Index
) -> None:
    """E2M1 codes, two a byte and the first in the low half, then one-byte scales; `scale_values` [256]."""
    values, width, group = shape
    half = width >> np.uint64(1)
    divisors = np.empty(width, dtype=np.float32)
    nibbles = np.empty(width, dtype=np.uint8)
    pairs = nibbles.view(np.uint16)
    for block in range(start, stop):
        codes_at = block * ((values >> np.uint64(1)) + values // group)
        scales_at = codes_at + (values >> np.uint64(1))
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            poisoned = _choose_scales(bits, first, width, group, scale_codes, records, scales_at)
            _spread(records, scales_at, group, scale_values, divisors)
            for place in range(width):
                number = bits[first + place]
                code = _minifloat_code(_magnitude(number) / divisors[place], 1, 1, 6.0)
                nibbles[place] = np.uint8(code | (np.uint32(number >> np.uint16(12)) & np.uint32(0x08)))
            for place in range(half):
                records[codes_at + place] = np.uint8(pairs[place] | (pairs[place] >> np.uint16(4)))
            if poisoned:
                _poison(records, codes_at, scales_at, width // group, group >> np.uint64(1))
            codes_at += half
            scales_at += width // group


@_inlined
def _needs_table(records: U8, codes_at: Index, width: Index) -> bool:
    """Whether an E4M3 code is subnormal or NaN."""
    highest = np.uint8(0)
    for place in range(width):
        magnitude = np.uint8(records[codes_at + place] & np.uint8(0x7F))
        highest = max(highest, np.uint8(magnitude - np.uint8(0x08)) if magnitude else np.uint8(0))
    return bool(highest > np.uint8(0x7E - 0x08))


@_inlined
def _rescaled(code: np.uint8, exponent: np.uint16) -> Any:
    """An E4M3 number, zero or normal, times a power of two: its fields move into place and the exponents are added."""
    magnitude = np.uint16(code & np.uint8(0x7F))
    field = np.uint16(np.uint16(magnitude << np.uint16(4)) + exponent) if magnitude else np.uint16(0)
    return np.uint16(field | np.uint16(np.uint16(code & np.uint8(0x80)) << np.uint16(8)))


@_kernel(_input(types.uint8), _PLACES, _PLACES, _input(types.uint16), _output(types.uint16), _SHAPE, *_SPAN)
def decode_e4m3(
    records: U8, starts: Places, places: Places, table: U16, bits: U16, shape: Shape, start: Index, stop: Index
) -> None:
    """E4M3 codes, then E8M0 scales: `table` [256 scales x 256 codes] has the bfloat16 bits of every product.

    Tokens without subnormal codes, nearly all, take a way that is twice as fast as the table and gives the same.
    """
    values, width, group = shape
    exponents = np.empty(width, dtype=np.uint16)
    for item in range(start, stop):
        block = np.uint64(places[item])
        codes_at = np.uint64(starts[item])
        scales_at = codes_at + values
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            extreme = _scale_exponents(records, scales_at, group, exponents)
            if extreme or _needs_table(records, codes_at, width):
                for index in range(width // group):
                    scale = np.uint64(records[scales_at + index]) << np.uint64(8)
                    for place in range(index * group, (index + np.uint64(1)) * group):
                        bits[first + place] = table[scale | np.uint64(records[codes_at + place])]
            else:
                for place in range(width):
                    bits[first + place] = _rescaled(records[codes_at + place], exponents[place])
            codes_at += width
            scales_at += width // group


@_kernel(_input(types.uint8), _PLACES, _PLACES, _input(types.uint32), _output(types.uint32), _SHAPE, *_SPAN)
def decode_e2m1(
    records: U8, starts: Places, places: Places, table: U32, pairs: U32, shape: Shape, start: Index, stop: Index
) -> None:
    """Two E2M1 codes a byte, then one-byte scales: `table` [256 scales x 256 bytes] has the bits of both products."""
    codes, group = shape[0] >> np.uint64(1), shape[2] >> np.uint64(1)
    for item in range(start, stop):
        block = np.uint64(places[item])
        code_at = np.uint64(starts[item])
        scales_at = code_at + codes
        place = block * codes
        for index in range(codes // group):
            scale = np.uint64(records[scales_at + index]) << np.uint64(8)
            for offset in range(group):
                pairs[place + offset] = table[scale | np.uint64(records[code_at + offset])]
            code_at += group
            place += group


@_inlined
def _write_word(records: U8, at: Index, word: np.uint16) -> None:
    records[at] = np.uint8(word)
    records[at + np.uint64(1)] = np.uint8(word >> np.uint16(8))


@_inlined
def _read_word(records: U8, at: Index) -> Any:
    return np.uint16(np.uint16(records[at]) | np.uint16(np.uint16(records[at + np.uint64(1)]) << np.uint16(8)))


@_kernel(_input(types.uint8), _PLACES, _PLACES, _input(types.uint16), _output(types.uint16), types.uint64, *_SPAN)
def translate(
    records: U8, starts: Places, places: Places, table: U16, out: U16, values: Index, start: Index, stop: Index
) -> None:
    """Block `places[i]` of `out` is `table` [65536] of the 16-bit words from byte `starts[i]` of `records` on."""
    for item in range(start, stop):
        source, target = np.uint64(starts[item]), np.uint64(places[item]) * values
        for place in range(values):
            out[target + place] = table[_read_word(records, source + (place << np.uint64(1)))]


@_kernel(_input(types.uint16), _input(types.uint16), _output(types.uint8), _SHAPE, *_SPAN)
def encode_int8(bits: U16, scale_bits: U16, records: U8, shape: Shape, start: Index, stop: Index) -> None:
    """Integers, then a bfloat16 scale a token: `scale_bits` [32768] by bits of the largest magnitude."""
    values, width, _ = shape
    shifter = np.float32(1.5 * 2.0**23)  # its last bit weighs 1: adding it rounds to an integer
    for block in range(start, stop):
        codes_at = block * (values + np.uint64(2) * (values // width))
        scale_at = codes_at + values
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            scale = scale_bits[_largest_magnitude(bits, first, width)]
            _write_word(records, scale_at, scale)
            divisor = _bf16(scale)
            for place in range(width):
                quotient = min(max(_bf16(bits[first + place]) / divisor, np.float32(-127)), np.float32(127))
                records[codes_at + place] = np.uint8(_bits(quotient + shifter))
            if scale == np.uint16(0xFFFF):
                for place in range(width):
                    records[codes_at + place] = np.uint8(0xFF)
            codes_at += width
            scale_at += np.uint64(2)


@_kernel(_input(types.uint8), _PLACES, _PLACES, _output(types.uint16), _SHAPE, *_SPAN)
def decode_int8(
    records: U8, starts: Places, places: Places, bits: U16, shape: Shape, start: Index, stop: Index
) -> None:
    """Integer times the token's scale: 16 significant bits at most, so exact in float32 and rounded once."""
    values, width, _ = shape
    for item in range(start, stop):
        block = np.uint64(places[item])
        codes_at = np.uint64(starts[item])
        scale_at = codes_at + values
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            scale = _bf16(_read_word(records, scale_at))
            for place in range(width):
                bits[first + place] = _rounded_bf16(np.float32(np.int8(records[codes_at + place])) * scale)
            codes_at += width
            scale_at += np.uint64(2)


@_kernel(_input(types.uint16), _output(types.uint8), _SHAPE, *_SPAN)
def encode_sign1(bits: U16, records: U8, shape: Shape, start: Index, stop: Index) -> None:
    """Sign bits, the first in the lowest bit, then a bfloat16 scale a token: the mean magnitude."""
    values, width, _ = shape
    size = width >> np.uint64(3)
    for block in range(start, stop):
        codes_at = block * (values // width) * (size + np.uint64(2))
        scale_at = codes_at + (values >> np.uint64(3))
        for first in range(block * values, (block + np.uint64(1)) * values, width):
            total = 0.0
            for place in range(size):
                code = np.uint32(0)
                for bit in range(np.uint64(8)):
                    number = bits[first + (place << np.uint64(3)) + bit]
                    code |= np.uint32(np.uint32(number >> np.uint16(15)) << np.uint32(bit))
                    total += np.float64(_bf16(np.uint16(number & np.uint16(0x7FFF))))
                records[codes_at + place] = np.uint8(code)
            scale = _rounded_bf16(np.float32(total / width))
            if scale >= np.uint16(0x7F80):
                scale = np.uint16(0xFFFF)
                for place in range(size):
                    records[codes_at + place] = np.uint8(0xFF)
            _write_word(records, scale_at, scale)
            codes_at += size
            scale_at += np.uint64(2)


@_kernel(_input(types.uint8), _PLACES, _PLACES, _input(types.uint64), _output(types.uint64), _SHAPE, *_SPAN)
def decode_sign1(
    records: U8, starts: Places, places: Places, table: U64, quads: U64, shape: Shape, start: Index, stop: Index
) -> None:
    """The token's scale with the sign bits of each byte: `table` [256 x 2] spreads them over two words of four."""
    values, width, _ = shape
    size = width >> np.uint64(3)
    for item in range(start, stop):
        block = np.uint64(places[item])
        codes_at = np.uint64(starts[item])
        scale_at = codes_at + (values >> np.uint64(3))
        quad = (block * values) >> np.uint64(2)
        for _ in range(values // width):
            scale = _read_word(records, scale_at)
            nan = np.uint16(scale & np.uint16(0x7FFF)) > np.uint16(0x7F80)
            four = np.uint64(np.uint16(0x7FC0) if nan else scale) * np.uint64(0x0001000100010001)
            signs = np.uint64(0) if nan else np.uint64(0xFFFFFFFFFFFFFFFF)
            for place in range(size):
                entry = np.uint64(records[codes_at + place]) << np.uint64(1)
                quads[quad] = four ^ (table[entry] & signs)
                quads[quad + np.uint64(1)] = four ^ (table[entry | np.uint64(1)] & signs)
                quad += np.uint64(2)
            codes_at += size
            scale_at += np.uint64(2)
