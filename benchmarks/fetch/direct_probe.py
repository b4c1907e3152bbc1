"""Measures the speed of the disk without fio: O_DIRECT reads from many threads. Linux only."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.fetch.subjects import Subject
from benchmarks.fetch.workloads import Ids
from storage_formats.codecs import Records
from storage_formats.format.layout import PAGE_BYTES

_SEGMENT = 1 << 20


class DirectProbe(Subject):
    """Reads the sectors of the requested records with O_DIRECT, and discards the data.

    The option `depth` is the number of threads. The option `merge` joins adjacent records into reads of up to 1 MiB.
    """

    setting = "O_DIRECT preadv from many threads"

    def open(self) -> None:
        self._pool = ThreadPoolExecutor(int(self.options["depth"]))
        self._local = threading.local()
        shards = list(self.source.spec.shard_numbers())
        paths = zip(shards, self.files(), strict=True)
        self._files = {shard: os.open(path, os.O_RDONLY | os.O_DIRECT) for shard, path in paths}

    def fetch(self, ids: Ids, out: Records) -> Records:
        list(self._pool.map(self._read, self._extents(ids)))
        return out

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._files.values():
            os.close(fd)

    def expected(self, ids: Ids) -> Records:
        return np.ones((len(ids), self.output_bytes), dtype=np.uint8)  # the worker fills the buffer with ones

    def _extents(self, ids: Ids) -> Iterator[tuple[int, int, int]]:
        """Yield the (shard, offset, length) of each read.

        Offset and length are multiples of the sector size, in bytes.
        """
        size = self.source.record_bytes
        unit = self.source.sector_bytes
        room = max(1, _SEGMENT // size) if self.options.get("merge") else 1
        rows = np.sort(ids) if room > 1 else ids
        shards, positions = (part.tolist() for part in np.divmod(rows, self.source.spec.shard_size))
        at = 0
        while at < len(rows):
            end = at + 1
            while end < min(at + room, len(rows)) and (shards[end], positions[end]) == (
                shards[at],
                positions[end - 1] + 1,
            ):
                end += 1
            start = positions[at] * size // unit * unit
            stop = -(-(positions[end - 1] + 1) * size // unit) * unit
            yield shards[at], start, stop - start
            at = end

    def _read(self, extent: tuple[int, int, int]) -> None:
        shard, offset, length = extent
        if getattr(self._local, "buffer", None) is None:
            self._local.buffer = mmap.mmap(-1, _SEGMENT + 2 * PAGE_BYTES)
        with memoryview(self._local.buffer) as view:
            os.preadv(self._files[shard], [view[:length]], offset)
