"""The interface of codecs, and checks of the arrays that callers pass to a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError
from storage_formats.row_ids import as_indices

BFloat16: TypeAlias = Any  # ml_dtypes.bfloat16 has no stub that NDArray accepts
Blocks: TypeAlias = NDArray[BFloat16]
"""Token blocks, ml_dtypes.bfloat16 [k, m, d]."""
Records: TypeAlias = NDArray[np.uint8]
"""Encoded blocks, uint8 [k, record_bytes]."""
Indices: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Indices or byte offsets, [k]."""
Check: TypeAlias = Callable[[int, int], None]
"""A function `check(start, stop)` that raises an exception if one of the records [start, stop) is damaged."""

BF16 = np.dtype(ml_dtypes.bfloat16)


class Codec(Protocol):
    """Encodes and decodes blocks of one shape in one precision. Thread-safe.

    Finite values decode to finite values. If a value is NaN or infinite, all values with the same scale are stored as
    NaN. Only `bf16` is lossless.

    The argument `threads` of the methods is the maximum number of threads. It does not change the result.

    Attributes:
        name: name of the precision. The directory of its shards under `tokens/` has the same name.
        logical_dtype: number format of the stored values, for example `bfloat16` or `int8`.
        block_shape: (m, d), tokens per block and values per token.
        record_bytes: length of a record in bytes, including scales.
        record_shape: shape of one record in the Zarr array of the precision.
        zarr_dtype: Zarr v3 data type of the Zarr array.
        fill_value: fill value of the Zarr array. A record of fill values decodes to NaN.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from storage_formats import codec
        >>> fp8 = codec("fp8", block_shape=(2, 4))
        >>> blocks = np.ones((3, 2, 4), ml_dtypes.bfloat16)
        >>> records = fp8.encode(blocks)
        >>> records.shape
        (3, 10)
        >>> bool((fp8.decode(records) == blocks).all())
        True
    """

    name: str
    logical_dtype: str
    block_shape: tuple[int, int]
    record_bytes: int
    record_shape: tuple[int, ...]
    zarr_dtype: str
    fill_value: int

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        """Encode blocks, bf16 [k, m, d], to records, uint8 [k, record_bytes].

        The result may share memory with `blocks`.
        """
        ...

    def decode(self, records: Records, out: Blocks | None = None, threads: int | None = None) -> Blocks:
        """Decode records, uint8 [k, record_bytes], to blocks, bf16 [k, m, d], in `out` or in a new array."""
        ...

    def decode_rows(
        self, records: Records, rows: Indices, out: Blocks | None = None, threads: int | None = None
    ) -> Blocks:
        """Decode `records[rows]` to bf16 [k, m, d] without copying the records.

        Args:
            records: uint8 [n, record_bytes], C-contiguous, for example a memory-mapped shard.
            rows: [k], indices of the records to decode.
            out: bf16 [k, m, d], array for the result. None allocates an array.
            threads: maximum number of threads.

        Raises:
            UsageError: a row is out of range, or an array has the wrong type or shape.
        """
        ...

    def scatter(
        self,
        memory: NDArray[np.uint8],
        offsets: Indices,
        out: Blocks,
        indices: Indices,
        threads: int | None = None,
        check: Check | None = None,
    ) -> None:
        """Decode the record that starts at byte `offsets[i]` of `memory` into `out[indices[i]]`, for each i.

        Args:
            memory: uint8 [bytes], contiguous.
            offsets: [k], byte offsets of records.
            out: bf16 [n, m, d].
            indices: [k], distinct indices of blocks of `out`.
            threads: maximum number of threads.
            check: called as `check(start, stop)` just before the same thread decodes records [start, stop). The records
                are then still in the processor's cache. `check` raises an exception if a record is damaged.

        Raises:
            UsageError: an offset or an index is out of range, or an array has the wrong type or shape.
        """
        ...


def check_blocks(blocks: Blocks, block_shape: tuple[int, int]) -> Blocks:
    """Return `blocks` as a contiguous array. Raise UsageError unless `blocks` is bfloat16 [k, *block_shape]."""
    if blocks.dtype != BF16 or blocks.ndim != 3 or blocks.shape[1:] != block_shape:
        raise UsageError(
            f"blocks must be bfloat16 [k, {block_shape[0]}, {block_shape[1]}], got {blocks.dtype} {list(blocks.shape)}"
        )
    return np.ascontiguousarray(blocks)


def check_records(records: Records, record_bytes: int) -> Records:
    """Return `records` as a contiguous array. Raise UsageError unless `records` is uint8 [k, record_bytes]."""
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != record_bytes:
        raise UsageError(f"records must be uint8 [k, {record_bytes}], got {records.dtype} {list(records.shape)}")
    return np.ascontiguousarray(records)


def check_contiguous_records(records: Records, record_bytes: int) -> Records:
    """Return `records`. Raise UsageError unless `records` is contiguous uint8 [k, record_bytes]."""
    if not records.flags.c_contiguous:
        raise UsageError("records must be C-contiguous; pass numpy.ascontiguousarray(records)")
    return np.asarray(check_records(records, record_bytes))


def check_indices(indices: Indices, count: int, name: str = "rows") -> NDArray[np.int64]:
    """Return a copy of `indices`, int64 [k]. Raise UsageError unless all indices are in 0..count - 1."""
    checked = as_indices(indices, name)
    if checked.size and (checked.min() < 0 or checked.max() >= count):
        raise UsageError(f"{name} must be in 0..{count - 1}, got values in {checked.min()}..{checked.max()}")
    return np.array(checked, dtype=np.int64, order="C")


def check_moves(
    memory: NDArray[np.uint8], record_bytes: int, offsets: Indices, count: int, indices: Indices
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return copies of `offsets` and `indices`, int64 [k].

    Raises:
        UsageError: a record at one of `offsets` extends beyond `memory`, or an index is not in 0..count - 1.
    """
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise UsageError(f"memory must be contiguous uint8 [bytes], got {memory.dtype} {list(memory.shape)}")
    record_offsets = check_indices(offsets, len(memory) - record_bytes + 1, "offsets")
    block_indices = check_indices(indices, count, "indices")
    if len(record_offsets) != len(block_indices):
        raise UsageError(
            f"offsets and indices must have the same length, got {len(record_offsets)} and {len(block_indices)}"
        )
    return record_offsets, block_indices


def check_out(out: Blocks | None, count: int, block_shape: tuple[int, int]) -> Blocks:
    """Return `out`, or a new array for `count` blocks if `out` is None.

    Raises:
        UsageError: `out` is not a writeable C-contiguous bfloat16 array [count, *block_shape].
    """
    shape = (count, *block_shape)
    if out is None:
        return np.empty(shape, dtype=BF16)
    if out.dtype != BF16 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError(
            f"out must be a writeable C-contiguous bfloat16 array of shape {list(shape)}, "
            f"got {out.dtype} {list(out.shape)}"
        )
    return out
