"""What a token precision is: a fixed-length record for each block, and its conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError

BFloat16: TypeAlias = Any  # ml_dtypes.bfloat16 has no stub that NDArray accepts
Blocks: TypeAlias = NDArray[BFloat16]
"""Token blocks, ml_dtypes.bfloat16 [k, m, d]."""
Records: TypeAlias = NDArray[np.uint8]
"""Encoded blocks, uint8 [k, record_bytes]."""
Rows: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Places of records in an array of records, [k]."""

BF16 = np.dtype(ml_dtypes.bfloat16)


class Codec(Protocol):
    """One precision for blocks of one shape.

    Conversions are defined for every input. Finite blocks decode to finite blocks. What is not finite is stored as
    NaN, with all that shares its scale, and a block of NaN so becomes the bytes of a hole (`bf16` keeps all bits).
    `threads` is the number of threads to use at most, by default `threads.default_threads()`; the result does not
    depend on it.

    Attributes:
        name: the precision's name, also its folder under `tokens/`.
        logical_dtype: what the stored bits mean.
        block_shape: (m, d).
        record_bytes: length of a record, scales included.
        record_shape: shape of a record as its Zarr array shows it.
        zarr_dtype: core Zarr v3 data type of that array.
        fill_value: its fill value; a record of it decodes to NaN.
    """

    name: str
    logical_dtype: str
    block_shape: tuple[int, int]
    record_bytes: int
    record_shape: tuple[int, ...]
    zarr_dtype: str
    fill_value: int

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        """bf16 [k, m, d] -> uint8 [k, record_bytes]; may share memory with `blocks`."""
        ...

    def decode(self, records: Records, out: Blocks | None = None, threads: int | None = None) -> Blocks:
        """uint8 [k, record_bytes] -> bf16 [k, m, d], into `out` where it is given."""
        ...

    def decode_rows(
        self, records: Records, rows: Rows, out: Blocks | None = None, threads: int | None = None
    ) -> Blocks:
        """Decode `records[rows]` in one pass, without a copy of them: bf16 [k, m, d], into `out` where it is given.

        `records` [n, record_bytes] must be C-contiguous, as a mapped shard is. UsageError for a row outside it.
        """
        ...

    def scatter(
        self, memory: NDArray[np.uint8], starts: Rows, out: Blocks, places: Rows, threads: int | None = None
    ) -> None:
        """Decode the record from byte `starts[i]` of `memory` on to `out[places[i]]`: from where it was read to.

        `memory` is contiguous uint8 [bytes], `out` bf16 [n, m, d]; `starts` and `places` are [k], these distinct.
        UsageError for a record or a place outside.
        """
        ...


def check_blocks(blocks: Blocks, block_shape: tuple[int, int]) -> Blocks:
    """`blocks` as a contiguous array; UsageError unless it is bfloat16 [k, *block_shape]."""
    if blocks.dtype != BF16 or blocks.ndim != 3 or blocks.shape[1:] != block_shape:
        raise UsageError(
            f"blocks must be bfloat16 [k, {block_shape[0]}, {block_shape[1]}], got {blocks.dtype} {list(blocks.shape)}"
        )
    return np.ascontiguousarray(blocks)


def check_records(records: Records, record_bytes: int) -> Records:
    """`records` as a contiguous array; UsageError unless it is uint8 [k, record_bytes]."""
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != record_bytes:
        raise UsageError(f"records must be uint8 [k, {record_bytes}], got {records.dtype} {list(records.shape)}")
    return np.ascontiguousarray(records)


def check_rows(rows: Rows, count: int, name: str = "rows") -> NDArray[np.int64]:
    """`rows` as int64 [k]; UsageError unless all are within 0..count - 1."""
    places = np.asarray(rows)
    if places.ndim != 1 or (places.size and places.dtype.kind not in "iu"):
        raise UsageError(f"{name} must be a flat sequence of integers, got {places.dtype} {list(places.shape)}")
    if places.size and (places.min() < 0 or places.max() >= count):
        raise UsageError(f"{name} must be in 0..{count - 1}, got {places.min()}..{places.max()}")
    return np.ascontiguousarray(places, dtype=np.int64)


def check_moves(
    memory: NDArray[np.uint8], record_bytes: int, starts: Rows, count: int, places: Rows
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(starts, places) as int64 [k]; UsageError unless records and places are within `memory` and 0..count - 1."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise UsageError(f"memory must be contiguous uint8 [bytes], got {memory.dtype} {list(memory.shape)}")
    begins, ends = check_rows(starts, len(memory) - record_bytes + 1, "starts"), check_rows(places, count, "places")
    if len(begins) != len(ends):
        raise UsageError(f"there are {len(begins)} records for {len(ends)} places")
    return begins, ends


def check_gathered(records: Records, record_bytes: int) -> Records:
    """`records`; UsageError unless it is C-contiguous uint8 [k, record_bytes]: a copy might be of a whole shard."""
    if not records.flags.c_contiguous:
        raise UsageError("records to gather from must be C-contiguous; pass a contiguous copy")
    return np.asarray(check_records(records, record_bytes))


def check_out(out: Blocks | None, count: int, block_shape: tuple[int, int]) -> Blocks:
    """`out`, or a new array, for `count` blocks; UsageError unless it is writeable C-contiguous bfloat16."""
    shape = (count, *block_shape)
    if out is None:
        return np.empty(shape, dtype=BF16)
    if out.dtype != BF16 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError(
            f"out must be a writeable C-contiguous bfloat16 array of shape {list(shape)}, "
            f"got {out.dtype} {list(out.shape)}"
        )
    return out
