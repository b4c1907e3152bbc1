"""An engine that reads records from memory maps, without a system call per record.

Use this engine only for records in the page cache. Other records cost one page fault per page, which is slow.
"""

from __future__ import annotations

from storage_formats.reading.base import Batch, Destination, Finish, Reader
from storage_formats.reading.files import ShardFiles
from storage_formats.reading.memory import memory_at

_OPEN_SHARDS = 64  # files that are open at the same time


class MappedEngine:
    """Passes records from memory maps of the shard files to the destination."""

    name = "mapped"
    ahead = 1
    piece_records = 1 << 30  # unlimited, because records are not copied to a buffer

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    def reader(self) -> Reader:
        return self

    def start(self, batch: Batch, destination: Destination) -> Finish:
        def finish() -> None:
            for first in range(0, len(batch.shard_spans), _OPEN_SHARDS):
                spans = batch.shard_spans[first : first + _OPEN_SHARDS]
                part = slice(spans[0][1], spans[-1][2])
                self._take(batch[part], destination, part)

        return finish

    def _take(self, batch: Batch, destination: Destination, part: slice) -> None:
        files, size = self._files.acquire(batch), self._files.record_bytes
        try:
            addresses = [files[shard].mapped_at() for shard, _, _ in batch.shard_spans]
            start = min(addresses)
            stop = max(
                address + files[shard].size for address, (shard, _, _) in zip(addresses, batch.shard_spans, strict=True)
            )
            offsets = batch.per_record(addresses) + batch.positions * size - start
            destination.take(memory_at(start, stop - start), offsets, part, threads=None)
        finally:
            self._files.release(files)

    def close(self) -> None:
        """Do nothing, because a memory map is closed together with its file."""

    def abandon(self) -> None:
        """Do nothing, because no thread writes to a destination after `take` has returned or raised."""
