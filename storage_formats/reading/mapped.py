"""The engine `mapped`, which reads records from memory maps of the token files."""

from __future__ import annotations

import mmap
import time

import numpy as np

from storage_formats.errors import CorruptIndexError
from storage_formats.reading.batch import Ints
from storage_formats.reading.checksums import StoredRecords
from storage_formats.reading.files import (
    ShardFile,
    ShardFiles,
    open_files,
    page_is_cached,
)
from storage_formats.reading.queues import RequestError
from storage_formats.reading.request import ReadRequest
from storage_formats.reading.sinks import Sink
from storage_formats.threads import fork_safe_lock, run_chunks

# maximum number of files that one read maps at the same time
MAPPED_SHARDS = 64
# Number of records of a request that are looked up in the page cache. The kernel keeps
# large parts of a file around each page that is mapped, so one record is not enough.
_LOOKED_AT = 4


class MappedShards:
    """The memory maps of the token files of one precision. Thread-safe.

    A map has a descriptor of its own, so it outlives its `ShardFile`. If there are too
    many maps, the first maps are freed.

    Args:
        is_trusted: whether the page cache is always trusted to hold the files.
    """

    def __init__(
        self, records: StoredRecords, files: ShardFiles, *, is_trusted: bool
    ) -> None:
        spec = records.index.manifest.spec
        self._size = records.record_bytes
        self._shard_size = spec.shard_size
        self._files = files
        self._is_trusted = is_trusted
        self._lock = fork_safe_lock()
        self._maps: dict[int, mmap.mmap] = {}
        # By shard: the address of the map; and the value of `time.monotonic()` until
        # which the page cache is trusted to hold the file, 0 without a map.
        self._addresses = np.zeros(spec.shards, dtype=np.int64)
        self._trusted_until = np.zeros(spec.shards)
        # By row: whether the record of the map was compared with its checksum. Pages of
        # this array that are never written take no memory.
        self._is_checked = np.zeros(spec.shards * spec.shard_size, dtype=np.bool_)

    def read_cached(self, row_ids: Ints, sink: Sink) -> bool:
        """Write the records of `row_ids` [k] to the sink, item by item, if all are in
        trusted maps and were compared with their checksums. Otherwise do nothing and
        return False.
        """
        shards, positions = np.divmod(row_ids, self._shard_size)
        with self._lock:
            if (
                self._trusted_until[shards].min() <= time.monotonic()
                or not self._is_checked[row_ids].all()
            ):
                return False
            maps = [self._maps[shard] for shard in set(shards.tolist())]
            sources = self._addresses[shards] + positions * self._size
        for mapped in maps:
            if mapped.size() < len(mapped):
                return False
        if not self._is_trusted and self.was_evicted(shards, positions):
            return False
        out_indices = np.arange(len(row_ids))

        def work(start: int, stop: int, _maps: object = maps) -> None:
            sink.write(sources[start:stop], out_indices[start:stop])

        # Copying takes a quarter of the time of decoding. So a query of 100 blocks is
        # copied by one thread, which is faster than two that share the GIL.
        cost = sink.block_bytes if sink.records is None else sink.block_bytes // 4
        run_chunks(work, len(row_ids), cost, None)
        return True

    def was_evicted(self, shards: Ints, positions: Ints) -> bool:
        """Return True if the page cache lacks one of a few records that lie at
        `positions` of `shards` [k] and are mapped. Then no shard is trusted any more.
        """
        step = -(-len(shards) // _LOOKED_AT)
        bases = self._addresses[shards[::step]]
        addresses = bases + positions[::step] * self._size
        for address in addresses[bases > 0].tolist():
            if page_is_cached(address) is False:
                with self._lock:
                    self._trusted_until[:] = 0
                return True
        return False

    def read(self, request: ReadRequest) -> None:
        """Read the records of a request.

        Raises:
            RequestError: the file system does not support memory maps.
            CorruptIndexError: a file was shortened, or a record is damaged.
        """
        spans = request.batch.shard_spans
        for first in range(0, len(spans), MAPPED_SHARDS):
            group = spans[first : first + MAPPED_SHARDS]
            part = slice(group[0][1], group[-1][2])
            batch = request.batch[part]
            files = self._files.acquire_for(batch, self._size)
            try:
                maps = {shard: self._map(shard, files[shard]) for shard in files}
            finally:
                self._files.release(files)
            rows = batch.shards * self._shard_size + batch.positions
            addresses = batch.per_record([*map(_address, maps.values())])
            request.take(
                addresses + batch.positions * self._size,
                part,
                maps,
                is_checked=None if request.always_checks else self._is_checked[rows],
            )
            with self._lock:
                # another thread may have freed maps meanwhile
                is_held = [self._maps.get(shard) is maps[shard] for shard in maps]
                self._is_checked[rows] = batch.per_record(is_held) == 1

    def _map(self, shard: int, file: ShardFile) -> mmap.mmap:
        with self._lock:
            mapped = self._maps.get(shard)
            if mapped is None:
                try:
                    mapped = mmap.mmap(file.fd, file.size, prot=mmap.PROT_READ)
                except OSError as error:
                    raise RequestError from error
                self._free(max(0, open_files() - 1))
                self._maps[shard] = mapped
                self._addresses[shard] = _address(mapped)
            # Reading the map beyond the end of the file would kill the process
            # (SIGBUS), so the length is compared before each read.
            if (size := mapped.size()) < len(mapped):
                raise CorruptIndexError(
                    f"the token file {file.path} was shortened from {len(mapped)} to"
                    f" {size} bytes while the file was open",
                    remedy="verify",
                )
            if self._is_trusted:
                self._trusted_until[shard] = np.inf
            elif file.is_cached:
                self._trusted_until[shard] = file.trusted_until
            return mapped

    def _free(self, keep: int) -> None:
        for shard in list(self._maps)[: max(0, len(self._maps) - keep)]:
            # first, in case that a signal handler raises an exception in between
            self._trusted_until[shard] = 0
            self._addresses[shard] = 0
            del self._maps[shard]
            first = shard * self._shard_size
            self._is_checked[first : first + self._shard_size] = False


def _address(mapped: mmap.mmap) -> int:
    return np.frombuffer(mapped, np.uint8).ctypes.data
