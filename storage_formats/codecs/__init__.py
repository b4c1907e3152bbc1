"""The precisions of stored tokens. To add a precision, add a row to the table in
`codecs.formats`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import Blocks, Codec, Records
from storage_formats.codecs.formats import BF16, FORMATS
from storage_formats.errors import RemovedPrecisionError, UsageError

__all__ = [
    "BF16",
    "Blocks",
    "Codec",
    "Records",
    "check_names",
    "codec",
    "fill_record",
    "finest",
    "precisions",
]

DEFAULT_BLOCK_SHAPE = (64, 384)
ALIASES = {"2bit": "gauss2", "1bit": "sign1"}
"""Further names of precisions that `codec` and the command line accept."""
_REMOVED = ("fp16", "mxfp8")


def precisions() -> tuple[str, ...]:
    """Return the names of all supported precisions, most accurate first.

    Examples:
        >>> from storage_formats import precisions
        >>> precisions()
        ('bf16', 'int8', 'fp8', 'nvfp4', 'mxfp4', 'gauss2', 'sign1')
    """
    return tuple(FORMATS)


def finest(names: Iterable[str]) -> str:
    """Return the most accurate of the precisions `names`."""
    order = precisions()
    return min(
        names, key=lambda name: order.index(name) if name in order else len(order)
    )


def codec(
    name: str,
    block_shape: tuple[int, int] = DEFAULT_BLOCK_SHAPE,
    offset: NDArray[np.float32] | None = None,
) -> Codec:
    """Return the codec of a precision. A codec encodes bfloat16 blocks to records, and
    decodes records to blocks.

    Args:
        name: one of `precisions()`, "2bit" for gauss2, or "1bit" for sign1.
        block_shape: (m, d), tokens per block and values per token.
        offset: offset block, float32 [m, d], which encoding subtracts and decoding
            adds. None for no offset. bf16 ignores the offset.

    Returns:
        A `storage_formats.codecs.base.Codec`. Its method `encode` takes
        ml_dtypes.bfloat16 [k, m, d] and returns uint8 [k, record_bytes]. Its method
        `decode` does the reverse.

    Raises:
        UsageError: the name is unknown, or d is not a multiple of the number that the
            precision requires (`Format.width_multiple`).

    Examples:
        >>> import ml_dtypes, numpy as np
        >>> from storage_formats import codec
        >>> blocks = np.linspace(-1, 1, 2 * 64 * 384).reshape(2, 64, 384)
        >>> blocks = blocks.astype(ml_dtypes.bfloat16)
        >>> fp8 = codec("fp8")
        >>> records = fp8.encode(blocks)
        >>> records.shape, records.dtype
        ((2, 24640), dtype('uint8'))
        >>> fp8.decode(records).shape
        (2, 64, 384)
    """
    name = ALIASES.get(name, name)
    check_names([name])
    if name not in FORMATS:
        raise UsageError(
            f"unknown precision '{name}'; choose one of: {', '.join(FORMATS)}"
        )
    return Codec(FORMATS[name], block_shape, offset)


def check_names(names: Iterable[str]) -> None:
    """Raise RemovedPrecisionError if a later version removed one of `names`."""
    for name in names:
        if name in _REMOVED:
            raise RemovedPrecisionError(
                f"the precision '{name}' was removed; edje-index 0.1.0 is the last"
                " version that reads it: convert the index to bf16 or fp8 with that"
                " version, and drop the precision"
            )


def fill_record(codec: Codec) -> Records:
    """Return the record that a shard stores for a hole, uint8 [1, record_bytes]."""
    value = np.array(
        codec.fill_value, dtype=np.dtype(codec.zarr_dtype).newbyteorder("<")
    )
    count = codec.record_bytes // value.itemsize
    return np.full((1, count), value).view(np.uint8)
