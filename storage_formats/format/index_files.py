"""Access to the files of an index that may come from an untrusted source. Only regular
files inside the directory of the index are opened. Devices, FIFOs, and symbolic links
that lead out of the index are refused.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import stat
from pathlib import Path

from storage_formats.arguments import shown
from storage_formats.errors import LinkError

# control characters, and the separator of paths on Windows
_REFUSED = re.compile(r"[\x00-\x1f\x7f\\]")
# Most file systems accept no longer names.
_MAX_PATH_BYTES = 255


def relative_path(name: str) -> str:
    """Return `name`, the path of a file relative to a directory, as an index, a model
    bundle or a repository lists it. The author of the list may be a stranger, so call
    this function before the path is joined to a directory.

    Raises:
        ValueError: `name` is not valid Unicode, could lead out of the directory, or
            cannot be the path of a file.
    """
    if (
        not {"", ".", ".."}.isdisjoint(name.split("/"))
        or _REFUSED.search(name)
        or len(name.encode()) > _MAX_PATH_BYTES
    ):
        raise ValueError(f"{shown(name)} is not the path of a file inside a directory")
    return name


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor.

    Args:
        flags: flags of open(2) in addition to O_RDONLY.

    Raises:
        OSError: `path` cannot be opened or is not a regular file.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSUP, "not a regular file", str(path))
        # Reads of the regular file must block as usual.
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_inside(root: str | Path, path: Path) -> Path:
    """Return `path` if it lies inside the directory `root` of an index or a bundle
    after all symbolic links are followed.

    Raises:
        LinkError: `path` lies outside `root`.
    """
    target = Path(os.path.realpath(path))
    if target.is_relative_to(os.path.realpath(root)):
        return path
    problem = (
        f"leads outside the directory, to {target}; copy the directory with the files"
        " that its links lead to (cp -rL), and use the copy"
        if target.exists()
        else f"is a link to {target}, which does not exist; get this file, for example"
        " with 'git annex get' or a new download"
    )
    raise LinkError(errno.ENOTSUP, problem, str(path))


def open_inside(root: str | Path, path: str | Path, flags: int = 0) -> int:
    """Open a regular file inside the index at `root` for reading, and return its
    descriptor.

    Args:
        flags: as for `open_regular`.

    Raises:
        OSError: `path` cannot be opened, is not a regular file, or lies outside the
            index.
    """
    folder = os.path.dirname(path)
    # If the last part of the path is a symbolic link, O_NOFOLLOW makes the call fail
    # with ELOOP. If a part before it is a link without a target, there is no such file.
    # Only then is the target of the whole path checked, which is slow.
    try:
        status = os.stat(folder)
        _check_folder(root, folder, status.st_dev, status.st_ino)
        return open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOENT):
            raise
    return open_regular(check_inside(root, Path(path)), flags)


# Results are cached, because resolving a path takes ten times as long as opening a
# file. Device and inode number are part of the cache key, so that a directory that
# replaces a checked one is checked again.
@functools.lru_cache
def _check_folder(root: str | Path, folder: str, device: int, inode: int) -> None:
    check_inside(root, Path(folder))


class IndexFile(io.BufferedReader):
    """A regular file inside the index at `root`, opened for buffered reading. Errors of
    `read` name the path of the file, and a read that would block (EAGAIN) raises an
    error instead of returning None.
    """

    def __init__(self, root: str | Path, path: str | Path) -> None:
        super().__init__(io.FileIO(open_inside(root, path)))
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


def read_index_file(
    root: str | Path, path: str | Path, *, max_bytes: int | None = None
) -> bytes:
    """Return the contents of a regular file inside the index at `root`.

    Raises:
        OSError: the file cannot be read, or is longer than `max_bytes`.
    """
    with IndexFile(root, path) as file:
        length = os.fstat(file.fileno()).st_size
        if max_bytes is not None and length > max_bytes:
            raise OSError(
                errno.EFBIG,
                f"the file has {length} bytes, but at most {max_bytes} are expected",
                str(path),
            )
        return file.read(length)
