"""Cache on the local disk for blocks of indexes on object stores.

Each cached shard is a sparse file, in which a record has the same offset as in the
token object. The file has no list of its records. A record counts as cached if its
bytes match the checksum that the index stores. Parts of the file that were never
written, damaged records, records that a killed process wrote only in part, and records
of another index that was at the same URL do not match. Such records are read from the
object store and written again.

Processes share the files without locks. Errors of the file system are never reported,
because the object store has all blocks. After an error, nothing is written to the cache
for a minute.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.cache import cache_directory
from storage_formats.errors import UsageError
from storage_formats.format.checksum import crc32c
from storage_formats.reading.checksums import StoredRecords
from storage_formats.reading.records import checksums_at
from storage_formats.reading.request import ReadRequest
from storage_formats.threads import fork_safe_lock, run_threads

SETTING = "EDJE_CACHE_BYTES"
_DEFAULT_BYTES = 10 << 30
_MAX_DIGITS = 18
# free disk space that the cache leaves to other programs
_FREE_BYTES = 1 << 30
# Maximum number of bytes that are written between two removals of files. A removal
# makes room for this number of bytes, so a larger number would need more free disk
# space.
_MAX_STEP = 640 << 20
# time without writes after an error of the file system
_PAUSE_SECONDS = 60.0
# number of threads that read cached records
_THREADS = 8
# without O_NONBLOCK, opening a FIFO would wait for a writer
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def cache_bytes() -> int:
    """Return the maximum size of the block cache, the value of `EDJE_CACHE_BYTES`. 0
    turns the cache off.

    Raises:
        UsageError: the value is not a number of bytes.
    """
    value = os.environ.get(SETTING, str(_DEFAULT_BYTES))
    if not value.isdecimal() or len(value) > _MAX_DIGITS:
        raise UsageError(
            f"the environment variable {SETTING} must be a number of bytes, not"
            f" {value!r}; 0 is no cache"
        )
    return int(value)


class BlockCache:
    """The cached blocks of one precision of an index on an object store. Thread-safe.

    Each time this object has written a sixteenth of the limit, or 640 MiB if this is
    less, it removes the least recently used files of all indexes to stay within the
    limit.

    Args:
        url: URL of the index.
        limit: maximum disk space of the files in bytes. If several objects write at the
            same time, the files can exceed the limit by the bytes that each further
            object writes between two removals.
    """

    def __init__(self, url: str, records: StoredRecords, limit: int) -> None:
        self._root = cache_directory() / "blocks"
        self._size = records.record_bytes
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._folder = self._root / f"{name}-{self._size}"
        self._records = records
        self._zeros_crc = crc32c(bytes(self._size))
        self._limit = limit
        self._step = max(1, min(limit // 16, _MAX_STEP))
        # Bytes written since the last removal. With this first value, the first write
        # removes files.
        self._unchecked = self._step
        self._paused_until = 0.0
        self._lock = fork_safe_lock()

    def _path(self, shard: int) -> Path:
        return self._folder / str(shard)

    def read(self, request: ReadRequest, piece: slice) -> NDArray[np.bool_]:
        """Pass the cached records of `request.batch[piece]` to the request. Return
        which records were cached, bool [n].
        """
        size = self._size
        batch = request.batch[piece]
        ranges, sources, buffer = batch.ranges(size)

        def read_range(place: tuple[int, int, memoryview]) -> None:
            shard, offset, target = place
            count = 0
            with contextlib.suppress(OSError):
                descriptor = os.open(self._path(shard), os.O_RDONLY | _FLAGS)
                try:
                    count = os.preadv(descriptor, [target], offset)
                    # notes the use
                    os.utime(descriptor)
                finally:
                    os.close(descriptor)
            # what cannot be read counts as a part that was never written
            target[count:] = bytes(len(target) - count)

        run_threads(read_range, ranges, min(_THREADS, len(ranges)))
        expected = self._records.expected(batch)
        # Parts of the file that were never written are read as zeros, so a record of
        # zeros never counts as cached.
        is_cached: NDArray[np.bool_] = checksums_at(sources, size) == expected
        is_cached &= expected != self._zeros_crc
        cached = np.flatnonzero(is_cached)
        if len(cached):
            is_checked = np.ones(len(cached), dtype=np.bool_)
            part = piece.start + cached
            request.take(sources[cached], part, buffer, is_checked=is_checked)
        return is_cached

    def write(self, shard: int, offset: int, records: memoryview) -> None:
        """Store consecutive records of a shard if the cache has room. `offset` is the
        byte offset of the first record in the token object.
        """
        # The lock is held during the write too: a removal in another thread resets the
        # count, so all counted bytes must be on the disk by then.
        with self._lock:
            if len(records) > self._step or time.monotonic() < self._paused_until:
                return
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._unchecked += len(records)
                if self._unchecked > self._step:
                    self._make_room()
                    self._unchecked = len(records)
                flags = os.O_WRONLY | os.O_CREAT | _FLAGS
                descriptor = os.open(self._path(shard), flags, 0o600)
                try:
                    os.pwrite(descriptor, records, offset)
                finally:
                    os.close(descriptor)
            except OSError:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _make_room(self) -> None:
        """Remove the least recently used files until the next `_step` bytes fit. Raise
        OSError if they do not fit after all files that can be removed are gone.
        """
        # (time of the last use, allocated bytes, path) of each file
        files = []
        for path in self._root.glob("*/*"):
            # another process may remove the file
            with contextlib.suppress(OSError):
                status = path.lstat()
                files.append((status.st_mtime, status.st_blocks * 512, path))
        size = sum(allocated for _, allocated, _ in files)
        free = shutil.disk_usage(self._root).free - _FREE_BYTES
        room = min(self._limit, size + free) - self._step
        for _, allocated, path in sorted(files):
            if size > room:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    size -= allocated
        if size > room:
            raise OSError(errno.ENOSPC, "the cache has no room")
