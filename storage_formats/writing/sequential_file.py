"""Writing of a large file from front to back at the speed of the device.

The writer uses direct I/O if possible, which bypasses the page cache. A thread writes one of two buffers while the
caller fills the other buffer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.atomic import naming

BUFFER_BYTES = 4 << 20


class SequentialFile:
    """Writes a new file from front to back. Not thread-safe.

    Args:
        path: path of the file, which must not exist.
        length: length in bytes.

    Raises:
        OSError: the file cannot be written, or the disk has too little space for `length` bytes.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._path = path
        self._fd, direct = _open_new(path)
        self._buffers = [_page_aligned_buffer(), _page_aligned_buffer()]
        self._filled = 0
        self._offset = 0
        self._thread = ThreadPoolExecutor(1, "edje-write")
        self._pending: Future[None] | None = None
        if direct:
            try:
                with naming(path):
                    os.posix_fallocate(self._fd, 0, length)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    self.close()
                    raise

    def write(self, data: NDArray[np.uint8]) -> None:
        """Append the flat array `data`. The caller may change `data` after this call."""
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER_BYTES - self._filled)
            target = np.frombuffer(self._buffers[0], dtype=np.uint8, count=count, offset=self._filled)
            target[:] = data[done : done + count]
            del target  # an mmap cannot be closed while a view of it exists
            done, self._filled = done + count, self._filled + count
            if self._filled == BUFFER_BYTES:
                self._send()

    def flush(self) -> None:
        """Write all buffered bytes to the file. This does not call fsync.

        With direct I/O, the length of the file must be a multiple of the page size.
        """
        self._send()
        self._wait()

    def close(self) -> None:
        """Close the file and free the buffers. Unflushed bytes are lost. May be called repeatedly."""
        self._thread.shutdown(wait=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            for buffer in self._buffers:
                buffer.close()

    def _send(self) -> None:
        """Pass the full buffer to the writing thread, and switch to the other buffer."""
        self._wait()
        if self._filled:
            self._pending = self._thread.submit(_write_all, self._fd, self._buffers[0], self._filled, self._offset)
            self._offset += self._filled
            self._filled = 0
            self._buffers.reverse()

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with naming(self._path):
                pending.result()


def _page_aligned_buffer() -> mmap.mmap:
    """Allocate a page-aligned buffer, with huge pages if possible."""
    # Huge pages reduce 1,024 page faults to a few.
    buffer = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _open_new(path: Path) -> tuple[int, bool]:
    """Create the file. Return (file descriptor, whether the file is open for direct I/O)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):  # not on macOS
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # the error of tmpfs and some network file systems for O_DIRECT
                raise
            path.unlink(missing_ok=True)  # Linux may have created the file before it refused
    return os.open(path, flags, 0o644), False


def _write_all(fd: int, buffer: mmap.mmap, length: int, offset: int) -> None:
    """Write the first `length` bytes of `buffer` at byte `offset` of the file."""
    done = 0
    with memoryview(buffer) as view:
        while done < length:
            with view[done:length] as rest:
                done += os.pwrite(fd, rest, offset + done)
