"""Writing of one token file, which consists of records, padding and the Zarr shard
index (SPEC.md section 6).
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.arrays import Floats, Ints
from storage_formats.atomic import naming
from storage_formats.codecs import BF16, Blocks, Codec, Records, fill_record
from storage_formats.errors import UsageError
from storage_formats.format.checksum import crc32c, crc32c_rows
from storage_formats.format.layout import padded_shard_bytes
from storage_formats.format.zarr_metadata import shard_index_bytes


def outside(codec: Codec, blocks: Blocks) -> dict[int, str]:
    """Return a description of the problem for each block that `codec` cannot store,
    keyed by the position of the block in `blocks`.

    A block cannot be stored if it has a token whose largest magnitude, after the offset
    was subtracted, is outside `codec.form.token_range`. The values of such a token
    would lose their precision or be limited to the largest value that the codec can
    store. A token of zeros can be stored.

    Args:
        blocks: bfloat16 [k, m, d].
    """
    low, high = codec.form.token_range
    if (low, high) == (0.0, math.inf):
        return {}
    largest = _largest(codec.residuals(blocks))
    is_small = (largest < low) & (largest > 0)
    if codec.offset is not None:
        # If a token nearly equals the offset, the differences between them are small.
        # They may be lost if they are no larger than the error with which the token was
        # rounded to bfloat16.
        is_small &= largest > 2.0**-8 * _largest(blocks)
    lost = is_small | (largest > high)
    # Tokens are visited in reverse order, so that the description of a block names its
    # first lost token.
    return {
        block: f"the largest value of token {token} is {largest[block, token]:g}, but"
        f" {codec.name} can store {low:g} to {high:g}; scale the tokens, or choose"
        " bf16, fp8 or int8"
        for block, token in reversed(np.argwhere(lost).tolist())
    }


def refuse_outside(codec: Codec, blocks: Blocks, row_ids: Ints) -> None:
    """Raise UsageError if `codec` cannot store one of `blocks` [k, m, d], see
    `outside`.

    Args:
        row_ids: int64 [k], row id of each block, for the error message.
    """
    problems = outside(codec, blocks)
    if problems:
        block = min(problems)
        raise UsageError(f"row {row_ids[block]}: {problems[block]}")


def _largest(blocks: Blocks) -> Floats:
    """Return the largest magnitude of each token of `blocks` [k, m, d], float32
    [k, m].
    """
    # Without the sign bit, the bits of a bfloat16, read as an integer, have the same
    # order as the magnitudes.
    bits = (blocks.view(np.uint16) & 0x7FFF).max(axis=2)
    magnitudes: Floats = bits.view(BF16).astype(np.float32)
    return magnitudes


class TokenShardFile:
    """Writes a token file from front to back, and computes its checksums. Not
    thread-safe.

    Args:
        path: path of the file, which must not exist.
        rows: number of rows of the shard.
        shard_size: number of rows of a full shard.

    Attributes:
        length: length of the finished file in bytes.
    """

    def __init__(self, path: Path, codec: Codec, rows: int, shard_size: int) -> None:
        self.path = path
        self.codec = codec
        self._rows = rows
        self._present = np.zeros(shard_size, dtype=np.bool_)
        self._checksums = np.empty(rows, dtype="<u4")
        self._fill = fill_record(codec)
        self._next = 0
        self._crc = 0
        self._index_offset, self.length = padded_shard_bytes(
            rows, shard_size, codec.record_bytes
        )
        with naming(path):
            # The file stays open until `close`.
            self._file = open(path, "xb")  # noqa: SIM115

    def put(self, positions: Ints, records: Records) -> None:
        """Write records at positions of the shard. Skipped positions become holes.

        Args:
            positions: int64 [k], ascending. The first must be greater than the last
                position of the previous call.
            records: uint8 [k, record_bytes].
        """
        # Each run of consecutive positions is written at once. `run` holds indices in
        # `positions`.
        for run in np.split(
            np.arange(len(positions)), np.flatnonzero(np.diff(positions) > 1) + 1
        ):
            if len(run):
                self._fill_to(int(positions[run[0]]))
                self._present[positions[run]] = True
                self._write(records[run[0] : run[-1] + 1])

    def finish(self) -> tuple[int, NDArray[np.uint32]]:
        """Write holes at the remaining positions, and then the padding and the shard
        index.

        Returns:
            (CRC-32C of the file, CRC-32C of each record as uint32 [rows]).
        """
        self._fill_to(self._rows)
        end = self._rows * self.codec.record_bytes
        tail = bytes(self._index_offset - end) + shard_index_bytes(
            self._present, self.codec.record_bytes
        )
        with naming(self.path):
            self._file.write(tail)
            self._file.flush()
        self._crc = crc32c(tail, self._crc)
        return self._crc, self._checksums

    def close(self) -> None:
        """Close the file. May be called repeatedly."""
        # `finish` has flushed the file and raised the errors of writes. A file that is
        # not finished is removed, so errors that occur when it is closed do not matter.
        with contextlib.suppress(OSError):
            self._file.close()

    def _fill_to(self, position: int) -> None:
        while self._next < position:
            count = min(position - self._next, 64)
            self._write(np.broadcast_to(self._fill, (count, self.codec.record_bytes)))

    def _write(self, records: Records) -> None:
        records = np.ascontiguousarray(records)
        stop = self._next + len(records)
        self._checksums[self._next : stop] = crc32c_rows(records)
        flat = records.reshape(-1)
        self._crc = crc32c(flat, self._crc)
        with naming(self.path):
            self._file.write(flat.data)
        self._next = stop
