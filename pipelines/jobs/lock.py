"""One driver an index: a lock that the kernel releases with the process that holds it."""

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
    """Hold `build/lock` of the index at `root`; the folders are made where they are missing, and left clean.

    Raises:
        EdjeError: another process holds it; the message names it.
    """
    path = Layout(root).build / "lock"
    made = [folder for folder in (root, path.parent) if not folder.exists()]
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
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # not empty: a build has begun
                folder.rmdir()


def _acquire(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace") or "unknown"
            os.close(fd)
            raise EdjeError(
                f"another build is at work on {path.parents[1]} (process {holder}); wait for it, or stop it"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)  # its holder finished and removed it in between
        path.parent.mkdir(parents=True, exist_ok=True)
