"""Reading what is in the page cache: from a memory map, on several threads, without a system call a record.

Only for what is known to be resident: a map reads missing pages one fault at a time, at a tenth of a disk's speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from storage_formats.reading.base import Batch, Finish, Reader, Target
from storage_formats.reading.files import ShardFiles
from storage_formats.reading.memory import memory_at

_SHARDS_AT_ONCE = 64  # files that are open together


class MappedEngine:
    """Has records taken from maps of the shard files."""

    name = "mapped"
    ahead = 1
    piece_records = 1 << 30  # no memory is needed for them

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        yield self

    def start(self, batch: Batch, target: Target) -> Finish:
        def finish() -> None:
            for first in range(0, len(batch.stretches), _SHARDS_AT_ONCE):
                stretches = batch.stretches[first : first + _SHARDS_AT_ONCE]
                part = slice(stretches[0][1], stretches[-1][2])
                self._take(batch[part], target, part)

        return finish

    def _take(self, batch: Batch, target: Target, part: slice) -> None:
        """Have `batch` taken, which is `part` of what goes to `target`."""
        files, size = self._files.acquire(batch), self._files.record_bytes
        try:
            maps = [files[shard].mapped_at() for shard, _, _ in batch.stretches]
            ends = [at + files[shard].size for at, (shard, _, _) in zip(maps, batch.stretches, strict=True)]
            start = min(maps)
            starts = batch.spread(maps) + batch.positions * size - start
            target.take(memory_at(start, max(ends) - start), starts, part, threads=None)
        finally:
            self._files.release(files)

    def close(self) -> None:
        """The maps are closed with their files."""
