"""Safe access to the files of an index from an untrusted source: only regular files
inside the index are opened.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor.

    Args:
        flags: flags of open(2) in addition to O_RDONLY.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSUP, "not a regular file", str(path))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_ahead(fd: int, offset: int = 0, length: int = 0) -> None:
    """Let the kernel read a part of a file into the page cache. By default, the whole
    file.
    """
    # not on macOS
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def check_inside(root: str | Path, path: Path) -> Path:
    """Return `path`. Symbolic links are followed to check that `path` lies inside the
    index at `root`.

    Raises:
        OSError: `path` lies outside the index.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise OSError(
            errno.ENOTSUP,
            "leads outside the index; replace the link with a copy of its target",
            str(path),
        )
    return path


class _IndexFile(io.BufferedReader):
    """A file whose errors name its path. A read that would wait (EAGAIN) raises an
    error instead of returning None.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(open_regular(path)))
        self._path = str(path)

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            data: bytes | None = super().read(size)
        except OSError as error:
            error.filename = self._path
            raise
        if data is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), self._path)
        return data


def open_index_file(root: str | Path, path: Path) -> BinaryIO:
    """Open a regular file inside the index at `root` for buffered reading."""
    return _IndexFile(check_inside(root, path))


def read_index_file(
    root: str | Path, path: Path, *, max_bytes: int | None = None
) -> bytes:
    """Return the contents of a regular file inside the index at `root`."""
    with open_index_file(root, path) as file:
        length = os.fstat(file.fileno()).st_size
        if max_bytes is not None and length > max_bytes:
            raise OSError(
                errno.EFBIG,
                f"the file has {length} bytes, but at most {max_bytes} are expected",
                str(path),
            )
        return file.read(length)
