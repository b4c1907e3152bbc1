"""An index in a directory. Files are flushed to the device and then renamed.

The methods of `Directory` are the operations of every place where an index can lie,
see `storage_formats.format.places`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from storage_formats.atomic import (
    fsync_parent,
    fsync_paths,
    make_directories,
    naming,
    replacing,
    write_bytes_atomic,
)
from storage_formats.errors import EdjeError
from storage_formats.format.file_check import (
    FileEntry,
    check_file,
    checked_pieces,
    difference,
    parsing,
    refuse,
)
from storage_formats.format.index_files import (
    IndexFile,
    check_inside,
    read_index_file,
)
from storage_formats.format.layout import Layout
from storage_formats.remote.objects import CHUNK_BYTES, Chunk
from storage_formats.system_calls import MissingCallError, promised

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.places import Place

# A plan lists the checksum of every list of inputs.
MAX_BYTES = 1 << 30
"""Most bytes of a file that `Directory.read` reads."""


class Directory(Layout):
    """An index in the directory `root`: its files, and the operations that change them
    durably.

    The paths in all arguments and results lie below `root`.
    """

    remote = None
    """The objects of the index; None in a directory."""

    @property
    def location(self) -> Path:
        """Path or URL of the index."""
        return self.root

    def address(self, path: Path) -> Path:
        """Return the path or the URL of a file, for messages."""
        return path

    def of_snapshot(self, manifest: Manifest) -> Directory:
        """Return this place for readers of the snapshot that `manifest` describes."""
        del manifest
        return Directory(self.root.absolute())

    def claimed(self) -> AbstractContextManager[None]:
        """Return a context manager in which no other process can change the index.

        Raises:
            EdjeError: another process is changing the index.
            UsageError: the index cannot be written here.
        """
        return locked(self.root)

    def is_claimed(self) -> bool:
        """Return True if this process still holds the claim of `claimed`."""
        # The operating system keeps the lock of `claimed` until it is released.
        return True

    def is_changing(self) -> bool:
        """Return True if a change of the index has begun and has not ended."""
        return self.journal.exists()

    def get(self, path: Path) -> None:
        """Make a file readable below `root`, if it exists."""

    def begin_task(self) -> None:
        """Remember the change that runs now. If another change runs later, `put` raises
        an EdjeError. Workers call this, because their driver may have died.
        """

    def read(self, path: Path, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Return the contents of a small file; None if it does not exist. Raise OSError
        if the file cannot be read or is longer than `max_bytes`.
        """
        try:
            return read_index_file(self.root, path, max_bytes=max_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file, or replace it."""
        write_bytes_atomic(path, data, self.staging)

    def put(self, staged: Sequence[tuple[Path, FileEntry]]) -> None:
        """Move complete private files to their final paths.

        Args:
            staged: (private path, entry of the final file) of each file. A file that
                lies at its final path already is made durable, and stays.
        """
        fsync_paths(path for path, _ in staged)
        finals = [self.root / entry.path for _, entry in staged]
        for (path, _), final in zip(staged, finals, strict=True):
            make_directories(final.parent)
            with promised("rename", final):
                path.replace(final)
        fsync_paths(final.parent for final in finals)

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Make committed files readable below `root`."""

    def contents(self, entry: FileEntry) -> Iterator[Chunk]:
        """Yield the contents of a committed file in pieces.

        Raises:
            CorruptIndexError: the file is missing, or differs from `entry`. The CRC-32C
                is compared after the last piece was yielded.
        """
        path = self.root / entry.path
        with parsing(str(path)), IndexFile(self.root, path) as file:
            refuse(path, difference(entry, os.fstat(file.fileno()).st_size))
            pieces = iter(lambda: file.read(CHUNK_BYTES), b"")
            yield from checked_pieces(path, entry, pieces)

    def copy(self, source: Place, entry: FileEntry) -> bool:
        """Copy a committed file of the index at `source` to this index, and compare it
        with its entry. Return False without a copy if this index has the file already.
        """
        path = self.root / entry.path
        if path.exists() and check_file(self.root, entry) is None:
            return False
        make_directories(path.parent)
        # If this process is killed, the private file remains until `build/` is removed.
        with replacing(path, self.staging) as file:
            left = entry.bytes
            # If the file system can, the two files share their disk blocks (reflink).
            # Only Linux has this system call, not every file system supports it, and it
            # may copy fewer bytes. An error of the disk itself occurs again below.
            with (
                contextlib.suppress(AttributeError, OSError),
                IndexFile(source.root, source.root / entry.path) as opened,
            ):
                descriptors = (opened.fileno(), file.fileno())
                while source.remote is None and (
                    count := os.copy_file_range(*descriptors, left)
                ):
                    left -= count
            file.seek(0)
            for piece in source.contents(entry):
                if left:
                    file.write(piece)
        fsync_parent(path)
        return True

    def names(self, folder: Path) -> list[Path]:
        """Return the paths of all files below `folder`, sorted."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        found = []
        for parent, folders, files in os.walk(folder, onerror=refuse):
            # A link to a directory counts as a file, and is not followed.
            links = [name for name in folders if Path(parent, name).is_symlink()]
            found += [Path(parent, name) for name in (*links, *files)]
        return sorted(found)

    def lengths(self, entries: Iterable[FileEntry]) -> dict[str, int]:
        """Return the lengths in bytes of those files of `entries` that exist, keyed by
        their relative paths.
        """
        lengths = {}
        for entry in entries:
            with contextlib.suppress(OSError):
                # `os.stat` takes a tenth of the time that it takes to open the file.
                lengths[entry.path] = os.stat(self.root / entry.path).st_size
        return lengths

    def remove(self, paths: Iterable[Path]) -> list[int]:
        """Remove files, in the given order. Return the length in bytes of each removed
        file.
        """
        lengths = []
        changed = set[Path]()
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                lengths.append(path.lstat().st_size)
                path.unlink()
                changed.add(path.parent)
        # Directories that are empty now are removed, apart from those of the layout.
        for folder in sorted(changed, reverse=True):
            while folder.parent not in (self.root, self.root.parent):
                try:
                    folder.rmdir()
                except OSError:
                    break
                folder = folder.parent
                changed.add(folder)
        # The removals must reach the device before the caller removes the journal.
        # Without a journal, no later change would look for these files.
        fsync_paths(folder for folder in changed if folder.is_dir())
        return lengths

    def commit(self, data: bytes) -> None:
        """Replace `index.json`. The caller holds the claim, and has compared the base.

        Raises:
            EdjeError: another process has replaced `index.json`, or it is not known
                whether `index.json` was replaced. Only an object store raises it.
        """
        # A worker may have been killed between making a directory of shards and
        # flushing its parent.
        parents = (self.root, self.root / "tokens", self.root / "checksums")
        fsync_paths(folder for folder in parents if folder.is_dir())
        self.write(self.manifest, data)

    def move_erased(self) -> None:
        """Move the files in `build/erased/` to the same paths in the index. Call this
        only after the commit of the erasure that wrote them.
        """
        if not self.erased.exists():
            return
        finals = []
        erased = Layout(self.erased)
        # Only erasures of earlier formats have files in `rows`.
        for folder in (*erased.shard_folders(), erased.rows):
            for path in self.names(folder):
                finals.append(self.root / path.relative_to(self.erased))
                path.replace(finals[-1])
        fsync_paths({final.parent for final in finals})
        shutil.rmtree(self.erased, ignore_errors=True)


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
