"""Safe access to the files of an index from an untrusted source: only regular files inside the index are opened."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

_downloads: dict[str, Callable[[list[Path]], None]] = {}  # by the directory of the local copy


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor.

    Args:
        path: path of the file.
        flags: flags of open(2) in addition to O_RDONLY.

    Raises:
        OSError: the file cannot be opened, or `path` is a FIFO, a device or a directory.
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


def check_inside(root: str | Path, path: Path) -> Path:
    """Return `path`. Symbolic links are followed to check that `path` lies inside the index at `root`.

    Raises:
        OSError: `path` lies outside the index.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise OSError(errno.ENOTSUP, "leads outside the index; replace the link with a copy of its target", str(path))
    return path


def open_index_file(root: str | Path, path: Path) -> BinaryIO:
    """Open a regular file inside the index at `root` for buffered reading.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or lies outside the index.
    """
    try:
        return os.fdopen(open_regular(check_inside(root, path)), "rb")
    except FileNotFoundError:
        if str(root) not in _downloads:
            raise
    download_missing(root, [path])
    return os.fdopen(open_regular(check_inside(root, path)), "rb")


def set_download(root: Path, download: Callable[[list[Path]], None]) -> None:
    """Let `open_index_file` call `download(paths)` for files that are missing in `root`.

    `root` is a local copy of some files of an index on an object store.
    """
    _downloads[str(root)] = download


def download_missing(root: str | Path, paths: Iterable[Path]) -> None:
    """Download those of `paths` that are missing, in parallel. Does nothing for an index on a file system.

    Raises:
        OSError: a path lies outside the index, or the object store holds no such object.
        EdjeError: the download failed, or an object is not the file that was committed.
    """
    if download := _downloads.get(str(root)):
        download([path for path in paths if not path.exists()])


def read_index_file(root: str | Path, path: Path, *, max_bytes: int | None = None) -> bytes:
    """Return the contents of a regular file inside the index at `root`.

    Raises:
        OSError: the file cannot be read, is not a regular file, lies outside the index, or is longer than `max_bytes`.
    """
    with open_index_file(root, path) as file:
        length = os.fstat(file.fileno()).st_size
        if max_bytes is not None and length > max_bytes:
            raise OSError(errno.EFBIG, f"the file has {length} bytes, but at most {max_bytes} are expected", str(path))
        return file.read(length)
