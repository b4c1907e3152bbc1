"""Reading what is in the page cache: copies from a memory map, on several threads, without a system call a record.

Only for what is known to be resident: a map reads missing pages one fault at a time, at a tenth of a disk's speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from storage_formats.reading.base import Batch, Finish, Ints, Reader, Target
from storage_formats.reading.files import ShardFiles
from storage_formats.reading.memory import copy_memory

_SHARDS_AT_ONCE = 64  # files that are open together


class MappedEngine:
    """Copies from maps of the shard files."""

    name = "mapped"
    ahead = 1
    decode_threads: int | None = None
    piece_records = 1 << 30  # no bound but that of what happens to the records

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        yield self

    def start(self, batch: Batch, target: Target) -> Finish:
        def finish() -> None:
            addresses, total = target.addresses, len(batch) * self._files.record_bytes
            for first in range(0, len(batch.stretches), _SHARDS_AT_ONCE):
                stretches = batch.stretches[first : first + _SHARDS_AT_ONCE]
                part = slice(stretches[0][1], stretches[-1][2])
                self._copy(batch[part], addresses[part], total)

        return finish

    def _copy(self, batch: Batch, addresses: Ints, total: int) -> None:
        """Copy records to `addresses`, as a part of `total` bytes."""
        files, size = self._files.acquire(batch), self._files.record_bytes
        try:
            maps = [files[shard].mapped_at() for shard, _, _ in batch.stretches]
            copy_memory(batch.spread(maps) + batch.positions * size, addresses, size, total=total)
        finally:
            self._files.release(files)

    def close(self) -> None:
        """The maps are closed with their files."""
