"""Reference codecs in plain NumPy. Tests compare the compiled kernels with these
codecs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import codec as codec_of
from storage_formats.codecs.base import BF16, Blocks, Codec, Records
from storage_formats.codecs.formats import CANONICAL_NAN, NAN_CODE, NAN_SCALE

# see `fp8` in SPEC.md section 6.1
LARGEST_INPUT = 15 * 2.0**124
E4M3 = (ml_dtypes.float8_e4m3fn, 448)
E2M1 = (ml_dtypes.float4_e2m1fn, 6)
# type and largest value
ELEMENTS = {"fp8": E4M3, "nvfp4": E2M1, "mxfp4": E2M1}


def every_code(name: str) -> tuple[Records, tuple[int, int]]:
    """Return (records, block shape) that hold every code under every scale. Of 1 and
    2 bits, they hold every byte of codes, and every scale with all codes.
    """
    words = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    codes = np.arange(256, dtype=np.uint8)
    if name == "int8":
        shape = (1, 256)
        scales = words.reshape(-1, 2)
    elif name in ("gauss2", "sign1"):
        # 64 tokens of 4 bytes
        shape = (64, 16 if name == "gauss2" else 32)
        scales = words.reshape(-1, 128)
    else:
        shape = (1, 512 if "fp4" in name else 256)
        scale_bytes = codec_of(name, shape).record_bytes - 256
        scales = np.repeat(codes[:, None], scale_bytes, axis=1)
    return np.concatenate([np.tile(codes, (len(scales), 1)), scales], axis=1), shape


def encode(codec: Codec, blocks: Blocks) -> Records:
    """Encode blocks, bf16 [k, m, d], to records, uint8 [k, record_bytes], in the
    format of `codec`.
    """
    numbers = blocks.astype(np.float32)
    match codec.name:
        case "fp8" | "nvfp4" | "mxfp4":
            return _encode_groups(codec, numbers)
        case "int8":
            return _encode_int8(codec, numbers)
        case "sign1":
            return _encode_sign1(codec, numbers)
        case "gauss2":
            return _encode_gauss2(codec, numbers)
    raise NotImplementedError(codec.name)


def decode(
    codec: Codec, records: Records, offset: NDArray[np.float32] | None = None
) -> Blocks:
    """Decode records, uint8 [k, record_bytes], in the format of `codec` to blocks,
    bf16 [k, m, d], and add `offset` [m, d].
    """
    # damaged records may contain scales that no encoder writes
    with np.errstate(over="ignore", invalid="ignore"):
        border = codec.values * codec.form.code_bits // 8
        codes, scales = np.split(records, [border], axis=1)
        match codec.name:
            case "fp8" | "nvfp4" | "mxfp4":
                numbers = _decode_groups(codec, codes, scales)
            case "int8":
                numbers = _bf16_scaled(codec, codes.view(np.int8), scales)
            case "sign1":
                negative = np.unpackbits(codes, axis=1, bitorder="little")
                signs = np.where(negative, -1, 1).astype(np.float32)
                numbers = _bf16_scaled(codec, signs, scales)
            case "gauss2":
                pairs = (codes[..., None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
                levels = np.array([1, -1, 107 / 32, -107 / 32], dtype=np.float32)
                numbers = _bf16_scaled(codec, levels[pairs], scales)
            case _:
                raise NotImplementedError(codec.name)
        blocks = numbers.reshape(-1, *codec.block_shape)
        # SPEC.md, section 6.2
        if offset is None or codec.name not in ("int8", "gauss2"):
            blocks = blocks.astype(BF16)
        if offset is not None:
            blocks = (blocks.astype(np.float32) + offset).astype(BF16)
    return np.where(
        np.isnan(blocks), np.uint16(CANONICAL_NAN), blocks.view(np.uint16)
    ).view(BF16)


def _encode_groups(codec: Codec, numbers: NDArray[np.float32]) -> Records:
    group = codec.form.group or codec.block_shape[1]
    groups = numbers.reshape(-1, codec.values // group, group)
    finite = np.asarray(np.isfinite(groups).all(axis=-1))
    groups = np.where(finite[..., None], groups, np.float32(0))
    scales = scale_codes(codec.name, np.abs(groups).max(axis=-1))
    quotients = (
        np.clip(groups, -LARGEST_INPUT, LARGEST_INPUT)
        / codec.form.scale_values[scales][..., None]
    )
    codes = _element_codes(quotients.astype(np.float32), *ELEMENTS[codec.name])
    codes[~finite] = NAN_CODE
    scales[~finite] = NAN_CODE
    codes = codes.reshape(-1, codec.values)
    if codec.form.code_bits == 4:
        codes = (codes[:, ::2] & np.uint8(15)) | (codes[:, 1::2] << np.uint8(4))
    return np.concatenate([codes, scales], axis=1)


def _element_codes(
    numbers: NDArray[np.floating], element: type, largest: float
) -> NDArray[np.uint8]:
    # ml_dtypes does not saturate
    return np.clip(numbers, -largest, largest).astype(element).view(np.uint8)


def scale_codes(name: str, largest: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the scale code of each group from its largest magnitude."""
    if name == "nvfp4":
        scales = _element_codes(largest.astype(np.float64) / (6 * 2.0**-3), *E4M3)
        return np.maximum(scales, np.uint8(1))
    fraction, exponents = np.frexp(largest.astype(np.float64))
    if name == "mxfp4":
        exponents = exponents - 1 - 2
    else:
        # the smallest exponent with which largest / 2 ** exponent is at most 448
        exponents = exponents - 9 + (fraction > 448 / 512)
    codes = np.clip(exponents, -127, 127) + 127
    return np.where(largest > 0, codes, 0).astype(np.uint8)


def _decode_groups(
    codec: Codec, codes: Records, scales: Records
) -> NDArray[np.float32]:
    form = codec.form
    if form.code_bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    group = codec.values // scales.shape[1]
    elements = form.values[codes].reshape(*scales.shape, group)
    return elements * form.scale_values[scales][..., None]


def _encode_int8(codec: Codec, numbers: NDArray[np.float32]) -> Records:
    finite, tokens = _finite_tokens(numbers)
    largest = np.abs(tokens).max(axis=-1).astype(BF16).astype(np.float32)
    scales = (largest / 127).astype(BF16).astype(np.float32)
    scales = np.clip(scales, 2.0**-133, 2.0**121)
    codes = np.clip(np.rint(tokens / scales[..., None]), -127, 127).astype(np.int8)
    return _records(codes.view(np.uint8), scales.astype(BF16).view(np.uint16), finite)


def _finite_tokens(
    numbers: NDArray[np.float32],
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Return which tokens are finite, and the tokens, with zeros for the others."""
    finite = np.asarray(np.isfinite(numbers).all(axis=-1))
    return finite, np.where(finite[..., None], numbers, np.float32(0))


def _records(
    codes: NDArray[np.uint8], scales: NDArray[np.uint16], finite: NDArray[np.bool_]
) -> Records:
    """Join codes [k, m, n] and scales [k, m], with NaN for tokens that are not
    finite.
    """
    codes[~finite] = NAN_CODE
    scales = np.where(finite, scales, np.uint16(NAN_SCALE))
    count, tokens, size = codes.shape
    codes = codes.reshape(count, tokens * size)
    return np.concatenate([codes, scales.view(np.uint8)], axis=1)


def _encode_sign1(codec: Codec, numbers: NDArray[np.float32]) -> Records:
    finite, tokens = _finite_tokens(numbers)
    magnitudes = np.abs(tokens).astype(np.float64)
    means = np.add.accumulate(magnitudes, axis=-1)[..., -1] / numbers.shape[-1]
    words = means.astype(np.float32).astype(BF16).view(np.uint16)
    codes = np.packbits(np.signbit(numbers), axis=-1, bitorder="little")
    return _records(codes, words, finite)


def _encode_gauss2(codec: Codec, numbers: NDArray[np.float32]) -> Records:
    finite, tokens = _finite_tokens(numbers)
    magnitudes = np.abs(tokens).astype(np.float64)
    width = numbers.shape[-1]
    squares = np.add.accumulate(magnitudes**2, axis=-1)[..., -1]
    is_large = magnitudes > (0.9816 * np.sqrt(squares / width))[..., None]
    small, large = (
        np.add.accumulate(np.where(mask, magnitudes, 0), axis=-1)[..., -1]
        for mask in (~is_large, is_large)
    )
    larger = is_large.sum(axis=-1)
    level = 107 / 32
    scales = (small + level * large) / (width - larger + level * level * larger)
    words = scales.astype(np.float32).astype(BF16).view(np.uint16)
    # 2 ** 126
    words = np.minimum(words, np.uint16(0x7E80))
    pairs = (np.signbit(numbers) | is_large << 1).reshape(*finite.shape, width // 4, 4)
    codes = (pairs << np.arange(0, 8, 2)).sum(axis=-1).astype(np.uint8)
    return _records(codes, words, finite)


def _bf16_scaled(
    codec: Codec, values: NDArray[np.float32], scales: Records
) -> NDArray[np.float32]:
    """Multiply the values of each token by its scale."""
    numbers = np.asarray(np.ascontiguousarray(scales).view(BF16), dtype=np.float32)
    return values.reshape(-1, *codec.block_shape) * numbers[..., None]
