"""The offset block of an index: an estimate of the mean block, which encoders subtract
and decoders add (SPEC.md section 6.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from storage_formats.arrays import Array, Floats
from storage_formats.codecs import Blocks, Codec, codec
from storage_formats.format.checksum import crc32c
from storage_formats.format.file_check import committed_content
from storage_formats.format.layout import IndexSpec, OffsetBlock
from storage_formats.format.manifest import offset_files

if TYPE_CHECKING:
    from storage_formats.format.places import Place

Offset = Floats
"""An offset block, float32 [m, d]."""

SAMPLE_BLOCKS = 1024
"""Number of blocks that a caller of `estimate_offset` should sample."""
# Smallest number of blocks for a mean. The mean of n blocks is an estimate: subtracting
# it instead of the true mean increases the squared error by a share of about 1/n.
_LEAST_BLOCKS = 32
# Smallest share of the energy (sum of squares) of the blocks that their mean must have.
# With a smaller share, subtracting the mean reduces the error by less than 3 %.
_LEAST_ENERGY = 0.06
# largest magnitude of a value of an offset block
_LARGEST = 2.0**100


def estimate_offset(batches: Iterable[Blocks]) -> Offset | None:
    """Return the mean of all blocks, float32 [m, d]. Return None if subtracting it
    would hardly reduce the encoding error: there are fewer than 32 blocks, or their
    mean has less than 6 % of their energy (sum of squares). Also return None if a
    magnitude in the mean is above 2^100.

    Args:
        batches: arrays of blocks without holes, bfloat16 [k, m, d] each.
    """
    total: NDArray[np.float64] | float = 0.0
    energy = 0.0
    count = 0
    for blocks in batches:
        values = blocks.astype(np.float64)
        total = total + values.sum(axis=0)
        energy += float(np.square(values).sum())
        count += len(blocks)
    if count < _LEAST_BLOCKS:
        return None
    mean = total / count
    is_small = float(np.square(mean).sum()) * count < _LEAST_ENERGY * energy
    if is_small or not np.abs(mean).max() <= _LARGEST:
        return None
    offset: Offset = np.asarray(mean, dtype=np.float32)
    return offset


def offset_block(offset: Offset, precisions: Iterable[str]) -> OffsetBlock | None:
    """Return the `OffsetBlock` that lists those of `precisions` that can be encoded
    with `offset`. Return None if none of them can.
    """
    names = tuple(name for name in precisions if codec(name, offset.shape).has_offset)
    return OffsetBlock(crc32c(offset.tobytes()), names) if names else None


def write_offset(place: Place, offset: Offset) -> None:
    """Write the values of the offset block of an index."""
    place.write(place.offset_values, offset.astype("<f4").tobytes())


def check_offset(offset: Array, block_shape: tuple[int, int]) -> None:
    """Raise ValueError unless `offset` fits blocks of `block_shape`."""
    if offset.shape != block_shape or offset.dtype != np.float32:
        raise ValueError(f"it has the shape {list(offset.shape)}, {offset.dtype}")
    # This comparison is also False for NaN.
    if not (np.abs(offset) <= _LARGEST).all():
        raise ValueError("it has values that are not finite or above 2^100")


def read_offset(place: Place, spec: IndexSpec) -> Offset | None:
    """Read the offset block of the index at `place`; None if it has none.

    Raises:
        CorruptIndexError: the file does not match the manifest, or a value is not
            finite or too large.
    """
    if spec.offset is None:
        return None
    m, d = spec.block_shape
    (entry,) = offset_files(spec)
    with committed_content(place, entry, "offset block", "repair the index") as data:
        offset: Offset = np.frombuffer(data, dtype="<f4").astype(np.float32)
        offset = offset.reshape(m, d)
        check_offset(offset, spec.block_shape)
    return offset


def stored_codec(place: Place, spec: IndexSpec, name: str) -> Codec:
    """Return the codec of the precision `name` of the index at `place`. The codec has
    the offset block if the index stores this precision with an offset.

    Raises:
        UsageError: see `codec`.
        CorruptIndexError: see `read_offset`.
    """
    has_offset = spec.offset is not None and name in spec.offset.precisions
    offset = read_offset(place, spec) if has_offset else None
    return codec(name, spec.block_shape, offset)
