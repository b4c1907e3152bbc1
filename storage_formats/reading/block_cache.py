"""Cache on the local disk for blocks of indexes on object stores.

Each cached shard is a sparse file, in which a record has the same offset as in the
token object. The file has no list of its records. A record counts as cached if its
bytes match the checksum that the index stores. Parts of the file that were never
written, damaged records, and records that a killed process wrote only in part do not
match. Such records are read from the object store and written again.

The name of the file contains the CRC-32C of the checksum file of the shard. If another
index replaces the index at the same URL, the checksums of the new index differ, so its
cache files have other names. Processes share the files without locks. Errors of the
file system are never reported, because the object store has all blocks. After an error,
nothing is written to the cache for a minute.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError
from storage_formats.format.checksum import crc32c
from storage_formats.reading.batch import Batch
from storage_formats.reading.checksums import BlockChecksums
from storage_formats.reading.memory import BufferPool
from storage_formats.reading.records import checksums_at
from storage_formats.reading.request import ReadRequest
from storage_formats.system_calls import advise
from storage_formats.threads import fork_safe_lock

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
# The time of the last use of a file is updated at most this often.
_USE_SECONDS = 60.0
# Disk space that a write may need in addition to its bytes: three disk blocks of 4 KiB.
# The first and the last disk block may be written only in part, and the file system may
# need one more for the list of the disk blocks of the file.
_WRITE_OVERHEAD = 12 << 10
# maximum number of cache files that one read opens at the same time
_OPEN_FILES = 64
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
        """Return the name of the cache file of each shard of `batch`, keyed by shard
        number.
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
        request: ReadRequest,
        first: int,
    ) -> NDArray[np.bool_]:
        """Pass the cached records of `batch` to `request`. Return which records were
        cached, bool [n].

        Args:
            batch: consecutive records of the batch of `request`.
            first: index of the first record in the batch of `request`.
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
                # Runs without gaps have the same indices in the buffer as in the batch.
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
                    # A record that cannot be read counts as not cached. The comparison
                    # of the checksums below finds records with wrong bytes.
                    with contextlib.suppress(OSError):
                        read_bytes = os.preadv(
                            descriptor, [buffer[begin * size : end * size].data], offset
                        )
                        is_read[begin : begin + read_bytes // size] = True
        read = np.flatnonzero(is_read)
        if len(read):
            expected = self._checksums.expected(batch[read])
            sources = buffer.ctypes.data + read * size
            actual = checksums_at(sources, size)
            # Parts of the file that were never written are read as zeros, so a record
            # of zeros never counts as cached.
            is_sound = (actual == expected) & (expected != self._zeros_crc)
            read = read[is_sound]
            request.take(
                sources[is_sound],
                first + read,
                buffer,
                is_checked=np.ones(len(read), dtype=np.bool_),
            )
        is_read[:] = False
        is_read[read] = True
        self._buffers.give_back(buffer)
        return is_read

    def write(self, name: str, position: int, records: memoryview) -> None:
        """Store consecutive records of a shard in the cache file `name`. `position` is
        the position of the first record in the shard.
        """
        self._files.write(name, position * self._size, records)


class CacheFiles:
    """The files of the block cache, which all processes of a user share. Thread-safe.

    Each time this process has written a sixteenth of the limit, or 640 MiB if this is
    less, it removes the least recently used files to stay within the limit.

    Args:
        limit: maximum disk space of the files in bytes. If several processes write at
            the same time, the files can exceed the limit by the bytes that each further
            process writes between two removals.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._step = max(1, min(limit // 16, _MAX_STEP))
        # Bytes written since the last removal. With this first value, the first write
        # of the process removes files.
        self._unchecked = self._step
        self._paused_until = 0.0
        self._lock = fork_safe_lock()

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
        """Write `data` to a file if the cache has room. Errors of the file system are
        ignored.
        """
        if time.monotonic() < self._paused_until:
            return
        try:
            size = len(data) + _WRITE_OVERHEAD
            if size > self._step:
                return
            # The lock is held during the write too: a removal in another thread resets
            # the count, so all counted bytes must be on the disk by then.
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
        """Remove the least recently used files until the next `_step` bytes fit.

        If the bytes do not fit after all files that can be removed are gone, pause all
        writes and return False.
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
                # another process has removed the file already
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
