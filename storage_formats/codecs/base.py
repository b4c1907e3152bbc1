"""The base class of codecs. It checks the arrays that callers pass and splits the
work between threads.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.arguments import repr_of
from storage_formats.codecs.formats import BF16, CANONICAL_NAN, NAN_CODE, Format
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
# The offset is subtracted from this number of blocks at a time. With a smaller number,
# each kernel would be called more often.
_OFFSET_BLOCKS = 32


class Codec:
    """Encodes and decodes blocks of one shape in one precision. Thread-safe.

    Finite values decode to finite values. Only `bf16` is lossless. In the other
    precisions, a value that is NaN or infinite is stored as NaN, and so are all values
    that share its scale.

    The argument `threads` of the methods is the maximum number of threads, which does
    not change the result. The compiled kernels, and with them Numba, are imported at
    the first conversion.

    Args:
        form: format of the records.
        block_shape: (m, d), tokens per block and values per token.
        offset: block that is subtracted before encoding and added after decoding,
            float32 [m, d]. None for no offset. `bf16` ignores this argument.

    Attributes:
        form: format of the records.
        name: name of the precision.
        has_offset: whether the precision takes an offset.
        block_shape: (m, d), tokens per block and values per token.
        record_shape: shape of one record in the Zarr array of the precision.
        zarr_dtype: data type of the Zarr array.
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

    def __init__(
        self,
        form: Format,
        block_shape: tuple[int, int],
        offset: NDArray[np.float32] | None = None,
    ) -> None:
        tokens, width = block_shape
        multiple = form.width_multiple
        if width % multiple:
            raise UsageError(
                f"precision '{form.name}' needs tokens whose width is a multiple of"
                f" {multiple}, but the width is {width}; use fp8 or int8, which accept"
                " any width"
            )
        self.form = form
        self.name = form.name
        self.has_offset = form.code_bits != 16
        self.block_shape = block_shape
        self.offset = offset if self.has_offset else None
        self.values = tokens * width
        self.record_bytes = tokens * form.token_bytes(width)
        self.record_shape: tuple[int, ...] = (self.record_bytes,)
        self.zarr_dtype = "uint8"
        self.fill_value = NAN_CODE
        if not self.has_offset:
            self.record_shape = block_shape
            self.zarr_dtype = "uint16"
            self.fill_value = CANONICAL_NAN

    # The array is not allocated in `__init__`, because the shape may come from a file
    # that is not checked yet, and may be huge.
    @functools.cached_property
    def _added(self) -> NDArray[np.float32]:
        """The values that decoding adds, float32 [m * d]. Without an offset, all are
        -0.0, because x + -0.0 equals x for every x, even for 0.0 and -0.0.
        """
        if self.offset is None:
            return np.full(self.values, -0.0, dtype=np.float32)
        added = self.offset.reshape(-1)
        if self.form.code_bits == 1:
            # see `kernels.decoder`
            return np.concatenate([added[::2], added[1::2]])
        return added

    __repr__ = repr_of("name", "block_shape")

    def decode_at(self, memory: Bytes, moves: Moves, bits: Bits) -> None:
        """Decode records of a precision with scales on the calling thread.

        The numbers in `moves` are not checked. A wrong offset reads memory outside
        `memory`, and a wrong index of a block writes memory outside `bits`.

        Args:
            memory: uint8 [bytes], contiguous.
            moves: (offsets, blocks), int64 [k] each, contiguous: the byte offset in
                `memory` of each record, and the index in `bits` of the block to which
                it is decoded. The indices are distinct.
            bits: bits of the decoded blocks, uint16 [n * m * d].
        """
        from storage_formats.codecs.kernels import decoder

        decode = decoder(self.form, self.offset is not None)
        decode(memory, moves, self._added, bits, (self.values, self.block_shape[1]))

    def residuals(self, blocks: Blocks, out: Blocks | None = None) -> Blocks:
        """Return `blocks` [k, m, d] minus the offset, rounded to bfloat16, in `out` or
        in a new array. Without an offset, return `blocks`.
        """
        if self.offset is None:
            return blocks
        out = np.empty(blocks.shape, dtype=BF16) if out is None else out[: len(blocks)]
        from storage_formats.codecs.kernels import subtract_offset

        bits = np.ascontiguousarray(blocks).view(np.uint16).reshape(-1)
        subtract_offset(bits, self.offset.reshape(-1), out.view(np.uint16).reshape(-1))
        return out

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        """Encode blocks, bf16 [k, m, d], to records, uint8 [k, record_bytes].

        The result may share memory with `blocks`.
        """
        m, d = self.block_shape
        if blocks.dtype != BF16 or blocks.ndim != 3 or blocks.shape[1:] != (m, d):
            raise UsageError(
                f"blocks must be bfloat16 [k, {m}, {d}], got {blocks.dtype}"
                f" {list(blocks.shape)}"
            )
        blocks = np.ascontiguousarray(blocks)
        if not self.has_offset:
            return blocks.view(np.uint8).reshape(len(blocks), self.record_bytes)
        from storage_formats.codecs.kernels import encoder

        # the kernel of integers subtracts the offset without rounding
        has_integers = self.form.code_bits == 8 and not self.form.is_float
        kernel = encoder(self.form, has_integers and self.offset is not None)
        records = np.empty((len(blocks), self.record_bytes), dtype=np.uint8)

        def encode(start: int, stop: int) -> None:
            step = max(1, stop - start)
            buffer = None
            if self.offset is not None and not has_integers:
                # All parts use one buffer, because new memory would cost a page fault
                # per 4 KiB.
                step = _OFFSET_BLOCKS
                buffer = np.empty((step, m, d), dtype=BF16)
            for first in range(start, stop, step):
                part = blocks[first : min(first + step, stop)]
                target = records[first : first + len(part)].reshape(-1)
                if buffer is not None:
                    part = self.residuals(part, buffer)
                bits = part.view(np.uint16).reshape(-1)
                kernel(bits, self._added, target, (m * d, d))

        run_chunks(encode, len(blocks), 2 * self.values, threads)
        return records

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
        if not self.has_offset:
            out.view(np.uint8).reshape(records.shape)[:] = records
            return out
        order = np.arange(len(records))
        offsets = order * self.record_bytes
        flat = np.ascontiguousarray(records).reshape(-1)
        bits = out.view(np.uint16).reshape(-1)

        def decode(start: int, stop: int) -> None:
            chunk = slice(start, stop)
            self.decode_at(flat, (offsets[chunk], order[chunk]), bits)

        run_chunks(decode, len(records), 2 * self.values, threads)
        return out


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
