"""An index in a directory. Files are flushed to the device and then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from storage_formats.atomic import (
    fsync_paths,
    make_directories,
    write_bytes_atomic,
)
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import Layout
from storage_formats.format.lock import locked
from storage_formats.format.place import Place
from storage_formats.system_calls import promised


class Directory(Place):
    """An index in the directory `root`."""

    @property
    def location(self) -> Path:
        return self.root

    @property
    def remote(self) -> None:
        return None

    def claimed(self) -> AbstractContextManager[None]:
        return locked(self.root)

    def is_claimed(self) -> bool:
        # The operating system keeps the lock of `claimed` until it is released.
        return True

    def part(self, folder: Path) -> Directory:
        return Directory(folder)

    def get(self, path: Path) -> None:
        del path

    def write(self, path: Path, data: bytes) -> None:
        write_bytes_atomic(path, data, self.staging)

    def put(self, staged: Sequence[tuple[Path, FileEntry]]) -> None:
        fsync_paths(path for path, _ in staged)
        finals = [self.root / entry.path for _, entry in staged]
        for (path, _), final in zip(staged, finals, strict=True):
            make_directories(final.parent)
            with promised("rename", final):
                path.replace(final)
        fsync_paths(final.parent for final in finals)

    def seal(self, paths: Iterable[Path]) -> None:
        paths = list(paths)
        folders = {path.parent for path in paths}
        fsync_paths([*paths, *folders, *(folder.parent for folder in folders)])

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        del entries

    def names(self, folder: Path) -> list[Path]:
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
        lengths = {}
        for entry in entries:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                # `os.stat` takes a tenth of the time that it takes to open the file.
                lengths[entry.path] = os.stat(self.root / entry.path).st_size
        return lengths

    def remove(self, paths: Iterable[Path]) -> list[int]:
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
        self.write(self.manifest, data)

    def move_erased(self) -> None:
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

    def close(self) -> None:
        """Do nothing: temporary files lie in `build/`, which the change removes."""
