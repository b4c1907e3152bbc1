"""The base class of codecs. It checks the arrays that callers pass and splits the
work between threads.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storage_formats.arguments import repr_of
from storage_formats.codecs.minifloat import NAN_CODE
from storage_formats.errors import UsageError
from storage_formats.threads import run_chunks

# ml_dtypes.bfloat16 has no type stub that NDArray accepts
BFloat16: TypeAlias = Any
Blocks: TypeAlias = NDArray[BFloat16]
"""Token blocks, ml_dtypes.bfloat16 [k, m, d]."""
Records: TypeAlias = NDArray[np.uint8]
"""Encoded blocks, uint8 [k, record_bytes]."""
Bits: TypeAlias = NDArray[np.uint16]
"""Bits of bfloat16 values, flat."""
Bytes: TypeAlias = NDArray[np.uint8]
"""Bytes of records, flat."""
Moves: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(offsets, blocks): the record at byte `offsets[i]` is decoded to block
`blocks[i]`. Both are int64 [k].
"""
Scorer: TypeAlias = Callable[[Bytes, NDArray[np.int64], NDArray[np.float32]], None]
"""Function (memory, offsets, scores) that writes the MaxSim of a query and the record
at each byte offset to `scores`.
"""
Span: TypeAlias = tuple[int, int]
"""(start, stop), a half-open range of items."""

BF16 = np.dtype(ml_dtypes.bfloat16)
# The offset is subtracted from this number of blocks at a time. With a smaller number,
# each kernel would be called more often.
_OFFSET_BLOCKS = 32


class Codec(ABC):
    """Encodes and decodes blocks of one shape in one precision. Thread-safe.

    Finite values decode to finite values. Only `bf16` is lossless. In the other
    precisions, a value that is NaN or infinite is stored as NaN, and so are all values
    that share its scale.

    The argument `threads` of the methods is the maximum number of threads, which does
    not change the result. A subclass imports its compiled kernels, and with them Numba,
    at the first conversion.

    Args:
        block_shape: (m, d), tokens per block and values per token.
        offset: block that is subtracted before encoding and added after decoding,
            float32 [m, d]. None for no offset. A precision without `has_offset` ignores
            this argument.

    Attributes:
        name: name of the precision. The directory of its shards under `tokens/` has the
            same name.
        has_offset: whether the precision takes an offset.
        subtracts: whether the method `_encode` subtracts the offset itself. Otherwise,
            `encode` subtracts the offset first.
        logical_dtype: number format of the stored values, for example `bfloat16` or
            `int8`.
        width_multiple: the width of a token must be a multiple of this number.
        token_range: (smallest, largest), the range in which the largest magnitude of a
            token should be, unless all values of the token are 0. A token whose largest
            magnitude is outside this range has larger errors than the tests allow.
        block_shape: (m, d), tokens per block and values per token.
        group: number of consecutive values of a token that share one scale.
        record_shape: shape of one record in the Zarr array of the precision.
        fill_value: fill value of the Zarr array. A record of fill values decodes to
            NaN.

    Examples:
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
    zarr_dtype = "uint8"
    fill_value = NAN_CODE
    has_offset = True
    subtracts = False
    width_multiple = 1
    token_range = (0.0, math.inf)

    def __init__(
        self, block_shape: tuple[int, int], offset: NDArray[np.float32] | None = None
    ) -> None:
        tokens, width = block_shape
        multiple = self.width_multiple
        if width % multiple:
            raise UsageError(
                f"precision '{self.name}' needs tokens whose width is a multiple of"
                f" {multiple}, but the width is {width}; use fp8 or int8, which accept"
                " any width"
            )
        self.block_shape = block_shape
        self.offset = offset if self.has_offset else None
        self.values = tokens * width
        self.record_bytes = tokens * self.token_bytes(width)
        self.record_shape: tuple[int, ...] = block_shape
        if self.zarr_dtype == "uint8":
            self.record_shape = (self.record_bytes,)
        self.group = self.group_of(width)
        self._geometry = (self.values, width, self.group)

    # The array is not allocated in `__init__`, because the shape may come from a file
    # that is not checked yet, and may be huge.
    @functools.cached_property
    def _added(self) -> NDArray[np.float32]:
        """The values that decoding adds, float32 [m * d]. Without an offset, all are
        -0.0, because x + -0.0 equals x for every x, even for 0.0 and -0.0.
        """
        if self.offset is None:
            return np.full(self.values, -0.0, dtype=np.float32)
        return self.offset.reshape(-1)

    @functools.cached_property
    def _halves(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The values of the offset with even and with odd indices."""
        return self._added[::2].copy(), self._added[1::2].copy()

    @classmethod
    def group_of(cls, width: int) -> int:
        """Return the number of values of a token that share one scale."""
        return width

    @classmethod
    def token_bytes(cls, width: int) -> int:
        """Return the number of bytes that a token of `width` values takes in a record,
        including its scales.
        """
        return 2 * width

    __repr__ = repr_of("name", "block_shape")

    def _encode(self, bits: Bits, records: Bytes, span: Span) -> None:
        """Encode the blocks in `bits` with the indices `range(*span)` to `records`."""
        raise NotImplementedError

    @abstractmethod
    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits, span: Span) -> None:
        """Decode the items of `moves` with the indices `range(*span)` on the calling
        thread.

        The numbers in `moves` are not checked. A wrong offset reads memory outside
        `memory`, and a wrong index of a block writes memory outside `bits`.

        Args:
            memory: uint8 [bytes], contiguous.
            moves: (offsets, blocks), int64 [k] each, contiguous: the byte offset in
                `memory` of each record, and the index in `bits` of the block to which
                it is decoded. The indices are distinct.
            bits: bits of the decoded blocks, uint16 [n * m * d].
        """

    def scorer(self, query: NDArray[np.float32]) -> Scorer | None:
        """Return a function that scores records with the vectors `query` [q, d] without
        decoding the records. Return None if the records must be decoded first.
        """
        return None

    def residuals(self, blocks: Blocks, out: Blocks | None = None) -> Blocks:
        """Return `blocks` [k, m, d] minus the offset, rounded to bfloat16, in `out` or
        in a new array. Without an offset, return `blocks`.
        """
        if self.offset is None:
            return blocks
        out = np.empty(blocks.shape, dtype=BF16) if out is None else out[: len(blocks)]
        # the kernel processes pairs of values, so it cannot process an odd number
        if self.values % 2:
            np.subtract(blocks.astype(np.float32), self.offset, out, casting="unsafe")
            return out
        from storage_formats.codecs.kernels import subtract_offset

        pairs = np.ascontiguousarray(blocks).reshape(-1).view(np.uint32)
        subtract_offset(pairs, *self._halves, out.reshape(-1).view(np.uint32))
        return out

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        """Encode blocks, bf16 [k, m, d], to records, uint8 [k, record_bytes].

        The result may share memory with `blocks`.
        """
        self._check_blocks(blocks)
        records = np.empty((len(blocks), self.record_bytes), dtype=np.uint8)
        blocks = np.ascontiguousarray(blocks)
        bits = blocks.view(np.uint16).reshape(-1)
        flat = records.reshape(-1)

        def encode(start: int, stop: int) -> None:
            if self.offset is None or self.subtracts:
                self._encode(bits, flat, (start, stop))
                return
            # All parts use one buffer, because new memory would cost a page fault per
            # 4 KiB.
            buffer = np.empty((_OFFSET_BLOCKS, *self.block_shape), dtype=BF16)
            for first, last in _pieces(start, stop):
                residuals = self.residuals(blocks[first:last], buffer)
                part = flat[first * self.record_bytes : last * self.record_bytes]
                self._encode(
                    residuals.view(np.uint16).reshape(-1), part, (0, last - first)
                )

        run_chunks(encode, len(blocks), 2 * self.values, threads)
        return records

    def _check_blocks(self, blocks: Blocks) -> None:
        m, d = self.block_shape
        if blocks.dtype != BF16 or blocks.ndim != 3 or blocks.shape[1:] != (m, d):
            raise UsageError(
                f"blocks must be bfloat16 [k, {m}, {d}], got {blocks.dtype}"
                f" {list(blocks.shape)}"
            )

    def decode(
        self, records: Records, out: Blocks | None = None, threads: int | None = None
    ) -> Blocks:
        """Decode records, uint8 [k, record_bytes], to blocks, bf16 [k, m, d], in
        `out` or in a new array.
        """
        if (
            records.dtype != np.uint8
            or records.ndim != 2
            or records.shape[1] != self.record_bytes
        ):
            raise UsageError(
                f"records must be uint8 [k, {self.record_bytes}], got {records.dtype}"
                f" {list(records.shape)}"
            )
        shape = (len(records), *self.block_shape)
        out = np.empty(shape, dtype=BF16) if out is None else out
        check_out(out, shape)
        order = np.arange(len(records))
        moves = (order * self.record_bytes, order)
        flat = np.ascontiguousarray(records).reshape(-1)
        bits = out.view(np.uint16).reshape(-1)
        run_chunks(
            lambda start, stop: self.decode_at(flat, moves, bits, (start, stop)),
            len(records),
            2 * self.values,
            threads,
        )
        return out


def _pieces(start: int, stop: int) -> Iterator[Span]:
    """Split a span into parts of at most `_OFFSET_BLOCKS` blocks."""
    for first in range(start, stop, _OFFSET_BLOCKS):
        yield first, min(first + _OFFSET_BLOCKS, stop)


def check_out(
    out: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any] = BF16
) -> None:
    """Raise UsageError unless `out` is a writeable C-contiguous array of `shape`
    and `dtype`.
    """
    if (
        out.dtype != dtype
        or out.shape != shape
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        raise UsageError(
            f"out must be a writeable C-contiguous {dtype} array of shape"
            f" {list(shape)}, got {out.dtype} {list(out.shape)}"
        )
