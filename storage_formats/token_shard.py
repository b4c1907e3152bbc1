"""One file of a token array: records in order, then padding, then the Zarr shard index (SPEC.md section 6)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.checksum import crc32c, crc32c_rows
from storage_formats.codecs import Codec, Records, fill_record
from storage_formats.layout import padded_shard_bytes

ABSENT = np.uint64(2**64 - 1)
"""Offset and length of an absent inner chunk: Zarr sharding codec, "Binary shard format"."""


def shard_index_bytes(present: NDArray[np.bool_], record_bytes: int) -> bytes:
    """The shard index for `present` [shard_size]: (offset, length) pairs, uint64, then their CRC-32C."""
    entries = np.full((len(present), 2), ABSENT, dtype="<u8")
    places = np.flatnonzero(present).astype("<u8")
    entries[present, 0] = places * np.uint64(record_bytes)
    entries[present, 1] = record_bytes
    data = entries.tobytes()
    return data + crc32c(data).to_bytes(4, "little")


class TokenShardFile:
    """Writes a shard file front to back, with the checksum of each record and of the whole file.

    Not thread-safe. The caller flushes and renames (`publish`); `close` leaves a complete file.
    """

    def __init__(self, path: Path, codec: Codec, rows: int, shard_size: int) -> None:
        self.path = path
        self._codec = codec
        self._rows = rows
        self._present = np.zeros(shard_size, dtype=np.bool_)
        self._checksums = np.empty(rows, dtype="<u4")
        self._fill = fill_record(codec)
        self._next = 0
        self._crc = 0
        self._index_offset, self.length = padded_shard_bytes(rows, shard_size, codec.record_bytes)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._fd, 0, self.length)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, position: int, records: Records) -> None:
        """Write `records` [k, record_bytes] at positions `position` onwards; skipped positions become holes."""
        self._fill_to(position)
        self._present[position : position + len(records)] = True
        self._write(records)

    def finish(self) -> tuple[int, NDArray[np.uint32]]:
        """Fill the rest with holes, write padding and index; returns (CRC-32C of the file, CRC-32C a row [rows])."""
        self._fill_to(self._rows)
        end = self._rows * self._codec.record_bytes
        tail = bytes(self._index_offset - end) + shard_index_bytes(self._present, self._codec.record_bytes)
        _write_all(self._fd, np.frombuffer(tail, dtype=np.uint8), end)
        self._crc = crc32c(tail, self._crc)
        return self._crc, self._checksums

    def flush(self) -> None:
        """Flush the file to the device."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the file descriptor; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fill_to(self, position: int) -> None:
        while self._next < position:
            count = min(position - self._next, 64)
            self._write(np.broadcast_to(self._fill, (count, self._codec.record_bytes)))

    def _write(self, records: Records) -> None:
        records = np.ascontiguousarray(records)
        stop = self._next + len(records)
        self._checksums[self._next : stop] = crc32c_rows(records)
        flat = records.reshape(-1)
        self._crc = crc32c(flat, self._crc)
        _write_all(self._fd, flat, self._next * self._codec.record_bytes)
        self._next = stop


def _write_all(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    """pwrite until everything is written: one call may write less than it was given."""
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
