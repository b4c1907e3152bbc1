"""A lock that lets only one process change an index. The kernel releases it when that process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout


@contextlib.contextmanager
def locked_index(root: Path) -> Iterator[None]:
    """Hold `build/lock` of the index at `root`. Missing directories are created, and removed if they stay empty.

    Raises:
        EdjeError: another process holds the lock; the message names it.
    """
    path = Layout(root).build / "lock"
    created = [directory for directory in (root, path.parent) if not directory.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _acquire(path)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            if not any(entry.name != path.name for entry in path.parent.iterdir()):
                path.unlink()
        os.close(fd)
        for directory in reversed(created):
            with contextlib.suppress(OSError):  # not empty: the job has stored something
                directory.rmdir()


def _acquire(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace")
            os.close(fd)
            process = f"process {holder}" if holder else "another process"  # it has not written its name yet
            raise EdjeError(f"{process} is working on {path.parents[1]}; wait until it ends, or stop it") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)  # the previous holder removed this file before we locked it
        path.parent.mkdir(parents=True, exist_ok=True)
