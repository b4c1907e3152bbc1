"""The record formats: one codec class per precision.

SPEC.md section 6 specifies them too. The compiled loops are in `codecs.kernels`, which
imports Numba, so a codec imports that module at its first conversion.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import (
    BF16,
    Bits,
    Blocks,
    Bytes,
    Codec,
    Moves,
    Records,
    Scorer,
    Span,
)
from storage_formats.codecs.minifloat import (
    CANONICAL_NAN,
    E2M1,
    E4M3,
    NAN_CODE,
    MiniFloat,
    e8m0_codes,
    e8m0_values,
)

NAN_SCALE = 0xFFFF
"""Bits of the bfloat16 scale of a token that contains NaN or infinity. Both bytes equal
the fill value, so that a record of fill values decodes to NaN.
"""
SECOND_LEVEL_SCALE = 2.0**-3
"""The constant factor of all scales of `nvfp4`."""
LARGE_LEVEL = 3.34375
"""The larger magnitude of a `gauss2` code, in units of the scale."""
LARGEST_INPUT = 15 * 2.0**124
"""Finite magnitudes above this limit are encoded as the limit. Rounding to the few
significant bits of E4M3 could turn them into 2**128, which is infinite in bfloat16.
"""


def _kernels() -> ModuleType:
    from storage_formats.codecs import kernels

    return kernels


class BF16Codec(Codec):
    """bfloat16 values, stored unchanged.

    A record contains m x d bfloat16 values of two bytes, little endian, tokens in
    order. A bfloat16 is the upper half of an IEEE 754 binary32: 1 sign bit, 8 exponent
    bits (bias 127), 7 fraction bits. All values are stored exactly, including NaN.
    """

    name = "bf16"
    logical_dtype = "bfloat16"
    has_offset = False
    zarr_dtype = "uint16"
    fill_value = 0x7FC0

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        self._check_blocks(blocks)
        return (
            np.ascontiguousarray(blocks)
            .view(np.uint8)
            .reshape(len(blocks), self.record_bytes)
        )

    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        start, stop = span
        copies = bits.view(np.uint8).reshape(-1, self.record_bytes)
        for offset, index in zip(
            moves[0][start:stop].tolist(), moves[1][start:stop].tolist(), strict=True
        ):
            copies[index] = memory[offset : offset + self.record_bytes]


class Int8Codec(Codec):
    """Eight-bit integers with one scale per token.

    A record contains, for m tokens of width d:

    - m x d two's complement integers of one byte, tokens in order
    - m bfloat16 scales, little endian

    A decoded value is integer x scale, rounded to bfloat16. The scale is the largest
    magnitude of the token divided by 127, rounded to bfloat16, and limited to the range
    from 2 ** -133 to 2 ** 121. The encoder rounds value / scale to the nearest integer,
    ties to even, and limits the integer to the range from -127 to 127. This is the
    symmetric scheme of Jacob et al., 2018.
    """

    name = "int8"
    logical_dtype = "int8"
    subtracts = True

    @classmethod
    def token_bytes(cls, width: int) -> int:
        return width + 2

    @staticmethod
    def scales(largest: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scale of each token, float32, with the shape of `largest`."""
        return np.clip(
            (largest / 127).astype(BF16).astype(np.float32), 2.0**-133, 2.0**121
        )

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        offset = np.empty(0, np.float32) if self.offset is None else self._added
        _kernels().encode_int8(
            bits, offset, _int8_scales(), records, self._geometry, span
        )

    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        _kernels().decode_int8(memory, moves, self._added, bits, self._geometry, span)


@functools.cache
def _int8_scales() -> NDArray[np.uint16]:
    """Return the bits of the scale, uint16 [32768], indexed by the bits of the
    largest magnitude of a token.
    """
    magnitudes = np.arange(0x8000, dtype=np.uint16).view(BF16).astype(np.float32)
    finite = np.isfinite(magnitudes)
    table = np.full(len(magnitudes), NAN_SCALE, dtype=np.uint16)
    table[finite] = Int8Codec.scales(magnitudes[finite]).astype(BF16).view(np.uint16)
    return table


class GroupScaledCodec(Codec):
    """Stores the codes of all values, then the scales of all groups. One byte stores
    one E4M3 code or two E2M1 codes.

    Attributes:
        scale_values: value of each scale code, float32 [256]. The value of code 0xFF is
            NaN.
    """

    element: MiniFloat
    scale_values: NDArray[np.float32]

    @classmethod
    def group_of(cls, width: int) -> int:
        return cls.width_multiple if cls.width_multiple > 1 else width

    @property
    def codes_bytes(self) -> int:
        """Length of the codes of a record in bytes."""
        return self.values if self.element is E4M3 else self.values // 2

    @classmethod
    def token_bytes(cls, width: int) -> int:
        codes = width if cls.element is E4M3 else width // 2
        return codes + width // cls.group_of(width)

    @staticmethod
    @abstractmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the scale code of each group, uint8, with the shape of `largest`."""

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        encode = _kernels().encode_e2m1
        scales = self.scale_values
        if self.element is E4M3:
            encode = _kernels().encode_e4m3
            # the scales are powers of two, so multiplying by the inverse is exact
            scales = np.float32(1) / scales
        encode(bits, self._scale_table(), scales, records, self._geometry, span)

    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        kernels = _kernels()
        if self.element is E2M1:
            kernels.decode_e2m1(
                memory,
                moves,
                *self._halves,
                bits.view(np.uint32),
                self._geometry,
                span,
                self.scale_values,
            )
        else:
            kernels.decode_e4m3(
                memory, moves, self._added, bits, self._geometry, span, self.products()
            )

    @classmethod
    @functools.cache
    def _scale_table(cls) -> NDArray[np.uint8]:
        """Return the scale code for each bfloat16 magnitude, uint8 [32768], indexed
        by the bits of the magnitude.
        """
        magnitudes = np.arange(0x8000, dtype=np.uint16).view(BF16).astype(np.float32)
        finite = np.isfinite(magnitudes)
        table = np.full(len(magnitudes), NAN_CODE, dtype=np.uint8)
        table[finite] = cls.scale_codes(magnitudes[finite])
        return table

    @classmethod
    @functools.cache
    def products(cls) -> NDArray[np.uint16]:
        """Return the bfloat16 bits of scale x code for each scale and code, uint16
        [256 * number of codes].
        """
        # Products overflow only for scales that no encoder writes.
        with np.errstate(over="ignore", invalid="ignore"):
            products = (cls.scale_values[:, None] * cls.element.values).astype(BF16)
        return np.where(
            np.isnan(products), np.uint16(CANONICAL_NAN), products.view(np.uint16)
        ).reshape(-1)


class FP8Codec(GroupScaledCodec):
    """E4M3 codes with one power-of-two scale per token.

    A record contains, for m tokens of width d:

    - m x d E4M3 codes of one byte, tokens in order
    - m E8M0 scales of one byte

    An E4M3 code has the sign in bit 7, the exponent (bias 7) in bits 6-3 and the
    fraction in bits 2-0. Exponent 0 is subnormal. 0x7F and 0xFF are NaN (Micikevicius
    et al., "FP8 Formats for Deep Learning", 2022). An E8M0 scale is 2 ** (byte - 127),
    and the byte 0xFF is NaN (OCP MX 1.0, section 5.4.1). A decoded value is code x
    scale.

    The encoder takes the smallest scale with which no code exceeds 448.
    """

    name = "fp8"
    logical_dtype = "float8_e4m3fn"
    element = E4M3
    scale_values = e8m0_values()

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        # largest / 448 is fraction x 2 ** exponent, with the fraction in [0.5, 1). If
        # the fraction is 0.5, the quotient is the power of two 2 ** (exponent - 1).
        fraction, exponent = np.frexp(largest.astype(np.float64) / E4M3.largest)
        return e8m0_codes(largest, exponent - (fraction == 0.5))


class MXFP4Codec(GroupScaledCodec):
    """MXFP4 (OCP Microscaling Formats (MX) Specification 1.0, 2023).

    A record contains, for m tokens of width d, where d is a multiple of 32:

    - m x d / 2 bytes of E2M1 codes, tokens in order, two codes per byte with the first
      in the low half
    - m x d / 32 E8M0 scales of one byte, one per group of 32 consecutive values of a
      token

    An E2M1 code has the sign in bit 3, the exponent (bias 1) in bits 2-1 and the
    fraction in bit 0. Its magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A scale is 2 **
    (byte - 127), and the byte 0xFF is NaN. A decoded value is code x scale.

    The scale of a group is the largest power of two that does not exceed 1/4 of the
    largest magnitude of the group (section 6.3). Magnitudes above 6 x scale are stored
    as 6 x scale.
    """

    name = "mxfp4"
    logical_dtype = "mxfp4_e2m1"
    width_multiple = 32
    element = E2M1
    scale_values = e8m0_values()

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        # floor(log2(largest)) minus 2, the exponent of the largest E2M1 number
        return e8m0_codes(largest, np.frexp(largest)[1] - 1 - 2)


class NVFP4Codec(GroupScaledCodec):
    """NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025) with a fixed
    second-level scale.

    A record contains, for m tokens of width d, where d is a multiple of 16:

    - m x d / 2 bytes of E2M1 codes (see `mxfp4`), tokens in order, two codes per byte
      with the first in the low half
    - m x d / 16 E4M3 scales of one byte (see `fp8`), one per group of 16 consecutive
      values of a token

    A decoded value is code x scale / 8, which is an exact bfloat16 value. The factor
    1/8 is the second-level scale of NVFP4. This factor is constant, so that a record
    does not depend on other records.

    The scale is 8/6 of the largest magnitude of the group, rounded to the nearest E4M3
    number, and at least 2 ** -9. Magnitudes above 6 x scale / 8 are stored as 6 x scale
    / 8.
    """

    name = "nvfp4"
    # largest code x scale / 8, for the smallest scale, 2 ** -9, and the largest, 448
    token_range = (6 * 2.0**-9 / 8, 6 * 448 / 8)
    logical_dtype = "nvfp4_e2m1"
    width_multiple = 16
    element = E2M1
    scale_values = E4M3.values * np.float32(SECOND_LEVEL_SCALE)

    @staticmethod
    def scale_codes(largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        scales = largest.astype(np.float64) / (E2M1.largest * SECOND_LEVEL_SCALE)
        return np.maximum(E4M3.encode(scales), np.uint8(1))


class SignCodec(Codec):
    """Stores the codes of all values, one or two bits each, then one bfloat16 scale
    per token.

    Attributes:
        code_bits: bits per code, 1 or 2.
        threshold: a magnitude has the larger level if it exceeds this number times the
            root mean square of its token.
    """

    code_bits: int
    threshold = np.inf

    @classmethod
    def token_bytes(cls, width: int) -> int:
        return width * cls.code_bits // 8 + 2

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        _kernels().encode_signs(
            bits, records, self.code_bits, self.threshold, self._geometry, span
        )


class Gauss2Codec(SignCodec):
    """Two bits per value, with one scale per token: four levels that suit values with
    a normal distribution.

    A record contains, for m tokens of width d, where d is a multiple of 4:

    - m x d / 4 bytes of codes, tokens in order, four codes per byte with the first in
      the lowest bits
    - m bfloat16 scales, little endian

    The low bit of a code is the sign, and 1 means negative. The high bit selects the
    magnitude: scale, or 3.34375 x scale, rounded to bfloat16. The encoder selects the
    larger magnitude if the magnitude of the value exceeds 0.9816 times the root mean
    square of the token. This threshold and the ratio of the two magnitudes, rounded to
    3.34375, are those of Max, "Quantizing for minimum distortion", 1960, table I. The
    scale minimises the squared error of the token for these codes. The encoder computes
    in float64, sums from the first value to the last, and rounds the scale to float32
    and then to bfloat16, limited to 2 ** 126.
    """

    name = "gauss2"
    logical_dtype = "gauss2"
    width_multiple = 4
    code_bits = 2
    threshold = 0.9816

    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        _kernels().decode_levels(memory, moves, self._added, bits, self._geometry, span)


class Sign1Codec(SignCodec):
    """The sign of each value, with one scale per token.

    A record contains, for m tokens of width d, where d is a multiple of 8:

    - m x d / 8 bytes of sign bits, tokens in order; the lowest bit of a byte comes
      first, and 1 means negative
    - m bfloat16 scales, little endian

    A decoded value is +scale or -scale. The scale is the mean magnitude of the token,
    which minimises the squared error (Rastegari et al., "XNOR-Net", 2016, section 3.1).
    The encoder sums the magnitudes in float64 from the first value to the last, divides
    the sum by d, and rounds the quotient to float32 and then to bfloat16.
    """

    name = "sign1"
    logical_dtype = "sign1"
    width_multiple = 8
    code_bits = 1

    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        if self.offset is None:
            _kernels().decode_signs(
                memory, moves, _sign_words(), bits.view(np.uint64), self._geometry, span
            )
            return
        pairs = bits.view(np.uint32)
        _kernels().decode_sign_sums(
            memory, moves, *self._halves, pairs, self._geometry, span
        )

    def scorer(self, query: NDArray[np.float32]) -> Scorer | None:
        m, d = self.block_shape
        # The kernel processes 64 signs at a time. With fewer than 256 values, rounding
        # the query would change a score by over 0.1 %.
        if d % 64 or d < 256:
            return None
        # Each query vector is rounded to integers of nine bits, -255 to 255, times a
        # step. The step of a vector of zeros is arbitrary.
        largest = np.abs(query).max(axis=1)
        steps = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(255)
        numbers = np.rint(query / steps[:, None]).astype(np.int16)
        # `bits[i, j]` contains bit j, in two's complement, of each integer of vector i
        bits = numbers[:, None] >> np.arange(9, dtype=np.int16)[:, None] & 1
        planes = np.packbits(bits.astype(np.uint8), axis=2, bitorder="little")
        # `einsum` uses no threads. The operator `@` would start the threads of BLAS,
        # which takes longer than the product.
        biases = np.einsum("qd,md->qm", query, self._added.reshape(m, d))
        arguments = (
            np.ascontiguousarray(planes.view(np.uint64).transpose(0, 2, 1)).reshape(-1),
            numbers.sum(axis=1, dtype=np.float32),
            steps,
            biases.reshape(-1),
        )

        def score(
            memory: Bytes, offsets: NDArray[np.int64], scores: NDArray[np.float32]
        ) -> None:
            sizes = (m, d, len(query))
            _kernels().max_sim_of_signs(memory, offsets, *arguments, scores, sizes)

        return score


@functools.cache
def _sign_words() -> NDArray[np.uint64]:
    """Return, for each byte of eight signs, two words of four bfloat16 values with only
    these sign bits set, uint64 [256 * 2].
    """
    byte = np.arange(256, dtype=np.uint16)[:, None]
    signs = ((byte >> np.arange(8, dtype=np.uint16)) & 1) << np.uint16(15)
    return signs.view(np.uint64).reshape(-1)


CODECS = {
    codec_class.name: codec_class
    for codec_class in (
        BF16Codec,
        Int8Codec,
        FP8Codec,
        NVFP4Codec,
        MXFP4Codec,
        Gauss2Codec,
        Sign1Codec,
    )
}
"""The codec class of each precision, most accurate first."""
