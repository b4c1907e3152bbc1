"""Writing a large file front to back at the device's speed.

Direct I/O where the file system has it: the page cache then costs no second copy and loses nothing that readers
keep in it. Two aligned buffers let the device write one while the caller fills the other. Measured on ext4, 50 MB
files, each flushed: direct 1.3 to 1.6 GB/s; buffered 1.2 to 1.3, but 0.28 after `posix_fallocate`, so space is
reserved ahead only for direct I/O.
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

BUFFER_BYTES = 4 << 20  # the fastest of 4 and 12 MiB in the measurement above


class SequentialFile:
    """A new file of a length known ahead. Not thread-safe.

    Raises OSError as the operating system gives it, a full disk at the start where space can be reserved.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._fd, direct = _open_new(path)
        self._buffers = [_page_aligned_buffer(), _page_aligned_buffer()]
        self._filled = 0
        self._offset = 0
        self._thread = ThreadPoolExecutor(1, "edje-write")
        self._pending: Future[None] | None = None
        if direct:
            try:
                os.posix_fallocate(self._fd, 0, length)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    self.close()
                    raise

    def write(self, data: NDArray[np.uint8]) -> None:
        """Append flat `data`; it may be changed as soon as this returns."""
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER_BYTES - self._filled)
            target = np.frombuffer(self._buffers[0], dtype=np.uint8, count=count, offset=self._filled)
            target[:] = data[done : done + count]
            del target  # an mmap with a view of it cannot be closed
            done, self._filled = done + count, self._filled + count
            if self._filled == BUFFER_BYTES:
                self._send()

    def flush(self) -> None:
        """Write what is buffered; fsync is the caller's. With direct I/O the end must be at a page."""
        self._send()
        self._wait()

    def close(self) -> None:
        """Give everything back; what was not flushed is lost. May be called twice."""
        self._thread.shutdown(wait=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            for buffer in self._buffers:
                buffer.close()

    def _send(self) -> None:
        """Hand the filled buffer to the writing thread and take the other one."""
        self._wait()
        if self._filled:
            self._pending = self._thread.submit(_write_all, self._fd, self._buffers[0], self._filled, self._offset)
            self._offset += self._filled
            self._filled = 0
            self._buffers.reverse()

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def _page_aligned_buffer() -> mmap.mmap:
    """Memory that direct I/O accepts; in huge pages where the system has them, for 4 page faults and not 1,024."""
    buffer = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _open_new(path: Path) -> tuple[int, bool]:
    """(file descriptor, whether it is open for direct I/O)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):  # not on macOS
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs and some network file systems refuse O_DIRECT so
                raise
            path.unlink(missing_ok=True)  # Linux may have made the file before refusing
    return os.open(path, flags, 0o644), False


def _write_all(fd: int, buffer: mmap.mmap, length: int, offset: int) -> None:
    """pwrite until everything is written: one call may write less than it was given."""
    done = 0
    with memoryview(buffer) as view:
        while done < length:
            with view[done:length] as rest:
                done += os.pwrite(fd, rest, offset + done)
