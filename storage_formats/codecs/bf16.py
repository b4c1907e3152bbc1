"""`bf16`: bfloat16 values, stored unchanged.

A record contains m x d bfloat16 values of two bytes, little endian, tokens in order. A bfloat16 is the upper half of an
IEEE 754 binary32: 1 sign bit, 8 exponent bits (bias 127), 7 fraction bits. All values are stored exactly, including
NaN.

>>> import ml_dtypes, numpy as np
>>> from storage_formats.codecs import codec
>>> blocks = np.linspace(-3, 3, 2 * 64 * 384).reshape(2, 64, 384).astype(ml_dtypes.bfloat16)
>>> values = codec("bf16").encode(blocks).view("<u2").reshape(-1, 64, 384)  # as Zarr readers return them
>>> tokens = (values.astype(np.uint32) << 16).view(np.float32)
>>> np.array_equal(tokens, blocks)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs.base import (
    BF16,
    Blocks,
    Check,
    Indices,
    Records,
    check_blocks,
    check_contiguous_records,
    check_indices,
    check_moves,
    check_out,
    check_records,
)
from storage_formats.threads import run_chunks


class BF16Codec:
    """Stores bfloat16 values unchanged. See `storage_formats.codecs.base.Codec`."""

    name = "bf16"
    logical_dtype = "bfloat16"
    zarr_dtype = "uint16"
    fill_value = 0x7FC0

    def __init__(self, block_shape: tuple[int, int]) -> None:
        self.block_shape = block_shape
        self.record_shape: tuple[int, ...] = block_shape
        self.record_bytes = 2 * block_shape[0] * block_shape[1]

    def encode(self, blocks: Blocks, threads: int | None = None) -> Records:
        blocks = check_blocks(blocks, self.block_shape)
        return blocks.view("u1").reshape(len(blocks), self.record_bytes)

    def decode(self, records: Records, out: Blocks | None = None, threads: int | None = None) -> Blocks:
        records = check_records(records, self.record_bytes)
        out = check_out(out, len(records), self.block_shape)
        out[...] = records.view(BF16).reshape(out.shape)
        return out

    def decode_rows(
        self, records: Records, rows: Indices, out: Blocks | None = None, threads: int | None = None
    ) -> Blocks:
        indices = check_indices(rows, len(records))
        records = check_contiguous_records(records, self.record_bytes)
        out = check_out(out, len(indices), self.block_shape)
        copies = out.view(np.uint8).reshape(-1, self.record_bytes)

        def gather(start: int, stop: int) -> None:
            # The other modes of take() gather into a temporary buffer, because an index may be out of range.
            np.take(records, indices[start:stop], axis=0, out=copies[start:stop], mode="clip")

        run_chunks(gather, len(indices), self.record_bytes, threads)
        return out

    def scatter(
        self,
        memory: NDArray[np.uint8],
        offsets: Indices,
        out: Blocks,
        indices: Indices,
        threads: int | None = None,
        check: Check | None = None,
    ) -> None:
        record_offsets, block_indices = check_moves(memory, self.record_bytes, offsets, len(out), indices)
        copies = check_out(out, len(out), self.block_shape).view(np.uint8).reshape(-1, self.record_bytes)
        if check is not None:
            check(0, len(record_offsets))
        for offset, index in zip(record_offsets.tolist(), block_indices.tolist(), strict=True):
            copies[index] = memory[offset : offset + self.record_bytes]
