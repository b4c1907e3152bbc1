"""System calls that a file system or a sandbox may lack.

- Promises: `flock`, `fsync` of a file and `rename`. Without them an index could be lost
  or mixed up, so `promised` refuses to go on.
- Advice: `posix_fadvise`, `madvise`, `mmap`, `O_DIRECT`, `copy_file_range`, and `fsync`
  of a directory. Without them a job is slower or less hardy, and goes on.
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
"""Error numbers that say that a file system has no such call."""

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
    """Context manager around a system call that has to work: `flock`, `fsync` or
    `rename`.

    Other errors get the file name `path` if they have none.

    Raises:
        MissingCallError: the file system of `path` does not have the call.
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
    """Tell the kernel how the bytes of an open file will be read. A length of 0 reaches
    to the end of the file.

    Does nothing on macOS, and where the file system takes no advice.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, start, length, getattr(os, f"POSIX_FADV_{advice}"))
