"""System calls that a file system or a sandbox may lack.

- Required calls: `flock`, `fsync` of a file, and `rename`. Without them, a crash or a
  second writer could damage an index, so `promised` raises an error.
- Optional calls: `posix_fadvise`, `madvise`, `mmap`, `O_DIRECT`, `copy_file_range`, and
  `fsync` of a directory. A job continues without them, but may be slower. Without
  `fsync` of a directory, a power failure may undo the latest renames of the job.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from storage_formats.errors import EdjeError

LACKING = frozenset(
    {
        errno.EINVAL,
        errno.ENODEV,
        errno.ENOLCK,
        errno.ENOSYS,
        errno.ENOTSUP,
        errno.ENOTTY,
        errno.EOPNOTSUPP,
        errno.EXDEV,
    }
)
"""Error numbers with which a file system reports that it lacks a call."""

# For one advice to load bytes, the kernel loads no more than the read-ahead of the
# disk, by default this number of bytes.
_READ_AHEAD = 128 << 10
_DANGERS = {
    "flock": "two programs could change the index at the same time",
    "fsync": "a power failure could damage the index",
    "rename": "a reader could see half a file",
}
_REMEDIES = {
    "flock": "on NFS, use version 4 or mount without 'nolock'; else keep",
    "fsync": "keep",
    "rename": "replace links in the index by the folders that they lead to, or keep",
}


class MissingCallError(EdjeError):
    """The file system of an index lacks a system call that every change needs."""


@contextlib.contextmanager
def promised(call: str, path: Path) -> Iterator[None]:
    """Context manager around a required system call: "flock", "fsync" or "rename".

    Raises:
        MissingCallError: the file system of `path` lacks the call.
        BlockingIOError: another process holds the lock.
        OSError: the call failed for another reason. The file name of the error is
            `path` if the system gives none.
    """
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if call == "flock" or error.errno in LACKING:
            raise MissingCallError(
                f"{call} does not work for {path}: {error.strerror}; without it,"
                f" {_DANGERS[call]}; {_REMEDIES[call]} the index on a local disk"
            ) from error
        if error.filename is None:
            error.filename = str(path)
        raise


def advise(fd: int, start: int = 0, length: int = 0, advice: str = "WILLNEED") -> None:
    """Tell the kernel how `length` bytes of an open file from offset `start` on will be
    read. A length of 0 means up to the end of the file.

    Does nothing on macOS, which lacks the call, and if the file system takes no advice.

    Args:
        advice: name of a constant of `posix_fadvise` without the prefix
            `POSIX_FADV_`.
    """
    if hasattr(os, "posix_fadvise"):
        code = getattr(os, f"POSIX_FADV_{advice}")
        stop = start + length
        with contextlib.suppress(OSError):
            for first in range(start, stop, _READ_AHEAD) or [start]:
                os.posix_fadvise(fd, first, min(_READ_AHEAD, stop - first), code)
