"""Reads the records of one precision with plain file reads, for copying records and checking results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.block_device import logical_block_bytes
from benchmarks.fetch.workloads import Ids
from storage_formats.codecs import BF16, Records, codec, fill_record
from storage_formats.format.layout import PAGE_BYTES, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import live_rows


class StoredRecords:
    """Locates the records of `precision`. Record i of a shard starts at byte i x record_bytes (SPEC.md section 6)."""

    def __init__(self, root: Path, precision: str) -> None:
        self.root = root
        self.precision = precision
        self._index = CommittedIndex.open(root)
        self.spec = self._index.manifest.spec
        self.codec = codec(precision, self.spec.block_shape)
        self._layout = Layout(root)

    @cached_property
    def row_ids(self) -> Ids:
        """Ids of the rows that are not deleted, int64, ascending."""
        return live_rows(self._index)

    @property
    def rows(self) -> int:
        """Number of rows that are not deleted."""
        return len(self.row_ids)

    @property
    def record_bytes(self) -> int:
        return self.codec.record_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a decoded block (bfloat16)."""
        tokens, width = self.spec.block_shape
        return tokens * width * int(BF16.itemsize)

    @cached_property
    def sector_bytes(self) -> int:
        """Offsets and lengths of direct reads are multiples of this number of bytes."""
        return logical_block_bytes(self.root) or PAGE_BYTES

    @property
    def direct_bytes(self) -> int:
        """Bytes of a record, rounded up to whole sectors."""
        return -(-self.record_bytes // self.sector_bytes) * self.sector_bytes

    @property
    def array_path(self) -> Path:
        """Directory of the Zarr array with the records."""
        return self._layout.token_array(self.precision)

    def files(self) -> list[Path]:
        """Return the paths of the shard files in row order."""
        return [self.shard_path(shard) for shard in self.spec.shard_numbers()]

    def shard_path(self, shard: int) -> Path:
        return self._layout.token_shard(self.precision, shard, record_ndim=len(self.codec.record_shape))

    def shards(self) -> Iterator[tuple[int, Records]]:
        """Yield the first row id and the records, uint8 [k, record_bytes], of each shard.

        Unused row ids get the records of holes. In a concatenation of all records, record i therefore has the row id i.
        """
        for shard in range(self.spec.shards):
            rows = self.spec.shard_rows(shard)
            ids = range(rows.start, min(rows.start + self.spec.shard_size, self.spec.rows))
            records = np.tile(fill_record(self.codec), (len(ids), 1))
            if rows:
                stored = np.fromfile(self.shard_path(shard), dtype=np.uint8, count=len(rows) * self.record_bytes)
                records[: len(rows)] = stored.reshape(len(rows), self.record_bytes)
            yield rows.start, records

    def read(self, ids: Ids) -> Records:
        """Return the records of `ids`. Each record is read with one file read."""
        out = np.empty((len(ids), self.record_bytes), dtype=np.uint8)
        for row, (shard, position) in enumerate(zip(*np.divmod(ids, self.spec.shard_size), strict=True)):
            offset = int(position) * self.record_bytes
            out[row] = np.fromfile(self.shard_path(int(shard)), dtype=np.uint8, count=out.shape[1], offset=offset)
        return out

    def requested_bytes(self, ids: Ids) -> tuple[int, int]:
        """Return (bytes in the records of `ids`, bytes in the pages that contain these records)."""
        rows = np.unique(ids)
        first, last = self._pages(rows)
        seen = np.concatenate([[-1], last[:-1]])
        pages = np.maximum(0, last - np.maximum(first, seen + 1) + 1).sum()
        return len(rows) * self.record_bytes, int(pages) * PAGE_BYTES

    def _pages(self, rows: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and the last page of each row.

        Pages are numbered across shards, and `rows` must be ascending.
        """
        shards, positions = np.divmod(rows, self.spec.shard_size)
        base = shards * (-(-self.spec.shard_size * self.record_bytes // PAGE_BYTES) + 1)
        offsets = positions * self.record_bytes
        return base + offsets // PAGE_BYTES, base + (offsets + self.record_bytes - 1) // PAGE_BYTES
