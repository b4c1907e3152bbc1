"""Cache on the local disk for blocks of indexes on object stores.

Each cached shard is a sparse file, in which a record has the same offset as in the
token object. The file does not say which records it has: a record is cached if it
matches its stored checksum. Holes of the file, records that a killed process has half
written, and damaged records do not match. They are read from the object store and
written again.

The name of the file contains the checksum of all checksums of the shard, so an index
that replaces another index at the same URL gets files of its own. Processes share the
files without locks. An error of the file system disables caching for a while and is
never reported, because the object store has all blocks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError
from storage_formats.format.checksum import crc32c
from storage_formats.reading.batch import Batch
from storage_formats.reading.checksums import BlockChecksums
from storage_formats.reading.destination import Destination, checksums_at
from storage_formats.reading.memory import BufferPool
from storage_formats.system_calls import advise

SETTING = "EDJE_CACHE_BYTES"
_DEFAULT_BYTES = 10 << 30
_MAX_DIGITS = 18
# free disk space that the cache leaves to others
_FREE_BYTES = 1 << 30
# a larger step would demand as much free disk space
_MAX_STEP = 640 << 20
# without writes after an error of the file system
_PAUSE_SECONDS = 60.0
# resolution of the time of the last use
_USE_SECONDS = 60.0
# disk blocks that a write covers in part, and one for the list of disk blocks
_WRITE_OVERHEAD = 12 << 10
_OPEN_FILES = 64
# without O_NONBLOCK, opening a FIFO waits
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
    """The cached blocks of one precision of an index on an object store.
    Thread-safe.
    """

    def __init__(
        self,
        url: str,
        checksums: BlockChecksums,
        record_bytes: int,
        files: CacheFiles,
        buffers: BufferPool,
    ) -> None:
        self._folder = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._checksums = checksums
        self._size = record_bytes
        self._zeros_crc = crc32c(bytes(record_bytes))
        self._files = files
        self._buffers = buffers

    def names(self, batch: Batch) -> dict[int, str]:
        """Return the name of the cached file of each shard of `batch`, keyed by
        shard number.
        """
        checksums = self._checksums.file_checksums(
            [shard for shard, _, _ in batch.shard_spans]
        )
        return {
            shard: f"{self._folder}/{self._size}-{shard}-{crc:08x}"
            for shard, crc in checksums.items()
        }

    def read(
        self,
        batch: Batch,
        names: Mapping[int, str],
        destination: Destination,
        first: int,
    ) -> NDArray[np.bool_]:
        """Pass the cached records of `batch` to `destination`. Return which records
        were cached, bool [n].

        Args:
            batch: consecutive records of the batch of `destination`.
            first: index of the first record in the batch of `destination`.
        """
        size = self._size
        buffer = self._buffers.borrow(len(batch) * size)
        is_read = np.zeros(len(batch), dtype=np.bool_)
        spans = batch.shard_spans
        for start in range(0, len(spans), _OPEN_FILES):
            group = spans[start : start + _OPEN_FILES]
            part = slice(group[0][1], group[-1][2])
            with contextlib.ExitStack() as opened:
                descriptors = {}
                for shard, _, _ in group:
                    if (descriptor := self._files.open(names[shard])) is not None:
                        opened.callback(os.close, descriptor)
                        descriptors[shard] = descriptor
                requests = [
                    (
                        descriptors[shard],
                        position * size,
                        part.start + begin,
                        part.start + end,
                    )
                    for shard, position, begin, end in batch[part].ranges(size)[0]
                    if shard in descriptors
                ]
                for descriptor, offset, begin, end in requests:
                    advise(descriptor, offset, (end - begin) * size)
                for descriptor, offset, begin, end in requests:
                    # the bytes may be wrong, and are compared below
                    with contextlib.suppress(OSError):
                        read_bytes = os.preadv(
                            descriptor, [buffer[begin * size : end * size].data], offset
                        )
                        is_read[begin : begin + read_bytes // size] = True
        read = np.flatnonzero(is_read)
        if len(read):
            expected = self._checksums.expected(batch[read])
            actual = checksums_at(buffer.ctypes.data + read * size, size)
            # A hole of the file would pass for a record of zeros.
            read = read[(actual == expected) & (expected != self._zeros_crc)]
        is_read[:] = False
        is_read[read] = True
        if len(read):
            destination.take(buffer, read * size, first + read)
        self._buffers.give_back(buffer)
        return is_read

    def write(self, name: str, position: int, records: memoryview) -> None:
        """Store neighbouring records in the file `name`. `position` is the position
        of the first of them.
        """
        self._files.write(name, position * self._size, records)


class CacheFiles:
    """The files of the block cache, which all processes of a user share. Thread-safe.

    After every sixteenth of the limit that this process writes, but at least after
    every 640 MiB, the files that were not used for longest are removed.

    Args:
        limit: maximum disk space of the files in bytes. Each further process that
            writes at the same time can exceed it by as much as it writes between two
            removals.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._step = max(1, min(limit // 16, _MAX_STEP))
        # bytes written since the last removal; a new process removes files first
        self._unchecked = self._step
        self._paused_until = 0.0
        self._lock = threading.Lock()

    def open(self, name: str) -> int | None:
        """Open a file for reading and note its use. Return the descriptor, or None
        if the file cannot be opened.
        """
        try:
            descriptor = os.open(self._root / name, os.O_RDONLY | _FLAGS)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if time.time() - os.fstat(descriptor).st_mtime > _USE_SECONDS:
                os.utime(descriptor)
        return descriptor

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write `data` to a file, if the disk has room. Errors are ignored."""
        if time.monotonic() < self._paused_until:
            return
        try:
            size = len(data) + _WRITE_OVERHEAD
            if size > self._step:
                return
            # also while writing, because a removal must see what other threads have
            # counted
            with self._lock:
                self._unchecked += size
                if self._unchecked > self._step:
                    self._unchecked = size
                    if not self._remove_unused():
                        return
                path = self._root / name
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o600)
                try:
                    os.pwrite(descriptor, data, offset)
                finally:
                    os.close(descriptor)
        except OSError:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _remove_unused(self) -> bool:
        """Remove the files that were not used for longest until there is room for more.

        Return False, and pause, if there is no room even without the files that can be
        removed.
        """
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # (time of the last use, allocated bytes, path) of each regular file
        files = []
        for folder in [
            entry.path
            for entry in os.scandir(self._root)
            if entry.is_dir(follow_symlinks=False)
        ]:
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        files.append(
                            (status.st_mtime, status.st_blocks * 512, entry.path)
                        )
        size = sum(allocated for _, allocated, _ in files)
        room = (
            min(self._limit, size + shutil.disk_usage(self._root).free - _FREE_BYTES)
            - self._step
        )
        for _, allocated, path in sorted(files):
            if size <= room:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                # another process was faster
                pass
            except OSError:
                continue
            size -= allocated
        if size > room:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        return size <= room


@functools.cache
def cache_files(root: Path, limit: int) -> CacheFiles:
    """Return the files of the block cache in `root`. All stores of a process share
    them.
    """
    return CacheFiles(root, limit)
