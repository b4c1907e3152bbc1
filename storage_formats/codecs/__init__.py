"""The registry of token precisions. Adding one is one module with a codec class, and its name here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from storage_formats.codecs.base import BF16, Blocks, Codec, Records
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.codecs.fp8 import FP8Codec
from storage_formats.codecs.fp16 import FP16Codec
from storage_formats.codecs.int8 import Int8Codec
from storage_formats.codecs.mxfp4 import MXFP4Codec
from storage_formats.codecs.mxfp8 import MXFP8Codec
from storage_formats.codecs.nvfp4 import NVFP4Codec
from storage_formats.codecs.sign1 import Sign1Codec
from storage_formats.errors import UsageError

__all__ = ["BF16", "Blocks", "Codec", "Records", "codec", "fill_record", "precisions"]

DEFAULT_BLOCK_SHAPE = (64, 384)

_CODECS: dict[str, Callable[[tuple[int, int]], Codec]] = {
    entry.name: entry
    for entry in (BF16Codec, FP16Codec, Int8Codec, FP8Codec, MXFP8Codec, NVFP4Codec, MXFP4Codec, Sign1Codec)
}


def precisions() -> tuple[str, ...]:
    """Names of every precision that this version reads and writes, the most faithful first."""
    return tuple(_CODECS)


def codec(name: str, block_shape: tuple[int, int] = DEFAULT_BLOCK_SHAPE) -> Codec:
    """The codec of precision `name` for blocks of `block_shape` (m, d).

    UsageError for an unknown name, and for a width that the precision cannot group.
    """
    try:
        return _CODECS[name](block_shape)
    except KeyError:
        raise UsageError(f"unknown precision '{name}'; known: {', '.join(_CODECS)}") from None


def fill_record(codec: Codec) -> Records:
    """The bytes of a hole: the fill value repeated, uint8 [1, record_bytes]."""
    value = np.array(codec.fill_value, dtype=np.dtype(codec.zarr_dtype).newbyteorder("<"))
    count = codec.record_bytes // value.itemsize
    return np.full((1, count), value).view(np.uint8)
