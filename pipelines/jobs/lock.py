"""A lock that lets only one process change an index."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from storage_formats.atomic import make_directories, naming
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout
from storage_formats.writing.begin import remove_unfinished


@contextlib.contextmanager
def locked_index(root: Path, *, erasing: bool = False) -> Iterator[None]:
    """Context manager that holds the lock `build/lock` of the index at `root`.

    If an earlier holder was killed, the temporary files that it was writing are removed first. At the end, its other
    files are removed too, unless `build/` shows that a change can be resumed.

    Args:
        root: directory of the index.
        erasing: True if the caller finishes an interrupted erasure.

    Raises:
        EdjeError: another process holds the lock, or an erasure was interrupted and `erasing` is False.
    """
    layout = Layout(root)
    root_is_new = not root.exists()
    fd = _acquire(layout)
    was_left = os.fstat(fd).st_size > 0  # an earlier holder has not removed the file
    try:
        if was_left:
            remove_unfinished(layout)
        with naming(layout.lock):
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()} on {socket.gethostname()}".encode())
            os.fsync(fd)  # workers on other machines read it
        if layout.erasure.exists() and not erasing:
            raise EdjeError(
                f"an erasure of rows of {root} has not finished; erase the same rows again to finish the erasure"
            )
        yield
    finally:
        if was_left:
            _remove_abandoned_files(layout)
        _remove_lock_file(layout, fd)
        os.close(fd)
        for directory in (layout.build, root) if root_is_new else (layout.build,):
            with contextlib.suppress(OSError):  # not empty: the job has stored something
                directory.rmdir()


def _acquire(layout: Layout) -> int:
    while True:
        make_directories(layout.build)
        try:
            fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # the previous holder removed the directory
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace")
            os.close(fd)
            process = f"process {holder}" if holder else "another process"  # the process has not written its name yet
            raise EdjeError(
                f"{process} is working on {layout.root}; wait until the process ends, or stop the process"
            ) from None
        if _is_lock_file(layout, fd):
            return fd
        os.close(fd)  # the previous holder removed this file before we locked it


def _is_lock_file(layout: Layout, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(layout.lock))
    except FileNotFoundError:
        return False


def _remove_abandoned_files(layout: Layout) -> None:
    """Remove the data files that no snapshot of an index names, if `build/` contains no other file than the lock."""
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.snapshots import kept_snapshots, remove_unnamed_files

    with contextlib.suppress(OSError, EdjeError):  # there is no index yet, or the index is damaged
        if not _has_other_files(layout):
            remove_unnamed_files(layout, kept_snapshots(CommittedIndex.open(layout.root)))


def _has_other_files(layout: Layout) -> bool:
    return any(entry.name != layout.lock.name for entry in layout.build.iterdir())


def _remove_lock_file(layout: Layout, fd: int) -> None:
    """Remove the lock file if `build/` contains no other file. The lock file of a later process is kept."""
    with contextlib.suppress(OSError):
        if _is_lock_file(layout, fd) and not _has_other_files(layout):
            layout.lock.unlink()
