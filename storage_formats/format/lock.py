"""The lock of an index, so that only one process changes the index at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from storage_formats.atomic import make_directories, naming
from storage_formats.errors import EdjeError
from storage_formats.format.index_files import check_inside
from storage_formats.format.layout import Layout
from storage_formats.system_calls import MissingCallError, promised


@contextlib.contextmanager
def locked(root: str | Path) -> Iterator[None]:
    """Context manager that holds the lock `build/lock` below `root`.

    The lock file of an index stays, because a network file system may show a removed
    file to another machine, which would then hold a lock on that file. If there is no
    index at the end, not even an unfinished one, the lock file is removed, and `root`
    too if it was created here.

    Raises:
        EdjeError: another process holds the lock.
        OSError: a link in the index leads out of it.
    """
    layout = Layout(Path(root).absolute())
    was_missing = not layout.root.exists()
    # Readers refuse a symbolic link that leads out of the index. A change would write
    # or remove files through such a link, so it is refused here, too.
    for folder in (layout.root, layout.erased):
        for pattern in ("*", "tokens/*", "checksums/*", "build/*"):
            for path in folder.glob(pattern):
                check_inside(layout.root, path)
    fd = _acquire(layout)
    try:
        with naming(layout.lock):
            os.ftruncate(fd, 0)
            # On a full disk, the lock file stays empty, so that files can be removed.
            with contextlib.suppress(OSError):
                os.write(fd, f"{os.getpid()} on {socket.gethostname()}".encode())
            # Workers on other machines read the lock file.
            with promised("fsync", layout.lock):
                os.fsync(fd)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            is_begun = [*layout.build.iterdir()] != [layout.lock]
            if not layout.manifest.exists() and not is_begun:
                layout.lock.unlink()
                layout.build.rmdir()
                if was_missing:
                    layout.root.rmdir()
        os.close(fd)


def _acquire(layout: Layout) -> int:
    """Create and lock the lock file. Return its file descriptor."""
    while True:
        make_directories(layout.build)
        try:
            fd = os.open(
                layout.lock,
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o666,
            )
        except FileNotFoundError:
            # the previous holder has removed `build/` since `make_directories`
            continue
        try:
            with promised("flock", layout.lock):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except MissingCallError:
            os.close(fd)
            raise
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace")
            os.close(fd)
            # The file is empty if the holder has not written its process and host yet.
            process = f"process {holder}" if holder else "another process"
            raise EdjeError(
                f"{process} is working on {layout.root}; wait until the process ends,"
                " or stop the process"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(layout.lock)):
                return fd
        # The previous holder removed this file before it was locked here. Another
        # process would create and lock a new file, so this lock would not keep it away.
        os.close(fd)
