"""Safe access to the files of an index from an untrusted source: only regular files inside the index are opened."""

from __future__ import annotations

import errno
import io
import os
import stat
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from storage_formats.format.object_store import ObjectFolder


@dataclass(frozen=True)
class RemoteFiles:
    """The index on an object store to which a local directory belongs.

    Attributes:
        folder: the objects of the index.
        download: function that downloads the given files to the directory.
        publish: function that commits the contents of a new `index.json` on the object store, before the file is
            replaced in the directory. None if the directory is only a cache for readers.
    """

    folder: ObjectFolder
    download: Callable[[list[Path]], None]
    publish: Callable[[bytes], None] | None = None


_remotes: dict[str, list[RemoteFiles]] = {}  # by the directory; several readers may have opened the same snapshot


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


class _IndexFile(io.BufferedReader):
    """A file whose errors name its path. A read that would wait (EAGAIN) raises an error instead of returning None."""

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
    """Open a regular file inside the index at `root` for buffered reading.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or lies outside the index.
    """
    try:
        return _IndexFile(check_inside(root, path))
    except FileNotFoundError:
        if remote_files(root) is None:
            raise
    download_missing(root, [path])
    return _IndexFile(check_inside(root, path))


def add_remote_files(root: Path, remote: RemoteFiles, user: object = None) -> None:
    """Let `open_index_file` download files that are missing in `root`, until `forget_remote_files` is called.

    `root` is a local copy of some files of an index on an object store. If `user` is given, that call is made once
    `user` is garbage, to which `remote` must not refer.
    """
    _remotes.setdefault(str(root), []).append(remote)
    if user is not None:
        weakref.finalize(user, forget_remote_files, root, remote)


def forget_remote_files(root: Path, remote: RemoteFiles) -> None:
    """Undo `add_remote_files`. May be called repeatedly."""
    remotes = _remotes.get(str(root), [])
    remotes[:] = [each for each in remotes if each is not remote]
    if not remotes:
        _remotes.pop(str(root), None)


def remote_files(root: str | Path) -> RemoteFiles | None:
    """Return the index on an object store to which the directory `root` belongs; None if there is none."""
    remotes = _remotes.get(str(root))
    return remotes[-1] if remotes else None


def download_missing(root: str | Path, paths: Iterable[Path]) -> None:
    """Download those of `paths` that are missing, in parallel. Does nothing for an index on a file system.

    Raises:
        OSError: a path lies outside the index, or the object store holds no such object.
        EdjeError: the download failed, or an object is not the file that was committed.
    """
    if remote := remote_files(root):
        remote.download([path for path in paths if not path.exists()])


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
