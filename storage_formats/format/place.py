"""The interface of the places where an index can lie (SPEC.md section 11)."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import Layout
from storage_formats.remote.objects import ObjectFolder
from storage_formats.remote.urls import IndexLocation

# A plan lists the checksum of every list of inputs.
MAX_BYTES = 1 << 30
"""Most bytes of a file that `Place.read` reads."""


class Place(Layout, abc.ABC):
    """The files of an index, and the operations that change them durably.

    The paths in all arguments and results lie below `root`. In a directory, these are
    the files of the index. On an object store, `root` is a directory for temporary
    files on this machine, and a path stands for the object with the same relative path.

    Use a place in a `with` statement, which removes its temporary files at the end.
    """

    @property
    @abc.abstractmethod
    def location(self) -> IndexLocation:
        """Path or URL of the index."""

    @property
    @abc.abstractmethod
    def remote(self) -> ObjectFolder | None:
        """The objects of the index; None in a directory."""

    @abc.abstractmethod
    def address(self, path: Path) -> IndexLocation:
        """Return the path or the URL of a file, for messages."""

    @abc.abstractmethod
    def of_snapshot(self, manifest: bytes) -> Self:
        """Return this place for readers of the snapshot whose `index.json` has the
        contents `manifest`. On an object store, `root` is then a directory that caches
        the files of this snapshot.
        """

    @abc.abstractmethod
    def claimed(self) -> AbstractContextManager[None]:
        """Return a context manager in which no other process can change the index.

        Raises:
            EdjeError: another process is changing the index.
            UsageError: the index cannot be written here.
        """

    @abc.abstractmethod
    def is_claimed(self) -> bool:
        """Return True if this process still holds the claim of `claimed`."""

    @abc.abstractmethod
    def is_changing(self) -> bool:
        """Return True if a change of the index has begun and has not ended."""

    @abc.abstractmethod
    def part(self, folder: Path) -> Place:
        """Return `folder`, which lies below `root`, as a place of its own."""

    @abc.abstractmethod
    def get(self, path: Path) -> None:
        """Make a file readable below `root`, if it exists."""

    @abc.abstractmethod
    def read(self, path: Path, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Return the contents of a small file; None if it does not exist. Raise OSError
        if the file cannot be read or is longer than `max_bytes`.
        """

    @abc.abstractmethod
    def write(self, path: Path, data: bytes) -> None:
        """Write a small file, or replace it."""

    def begin_task(self) -> None:
        """Remember the change that runs now. If another change runs later, `put` raises
        an EdjeError. Workers call this, because their driver may have died.
        """

    @abc.abstractmethod
    def put(self, staged: Sequence[tuple[Path, FileEntry]]) -> None:
        """Move complete private files to their final paths.

        Args:
            staged: (private path, entry of the final file) of each file. A file that
                lies at its final path already is made durable, and stays.
        """

    @abc.abstractmethod
    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Make committed files readable below `root`."""

    @abc.abstractmethod
    def names(self, folder: Path) -> list[Path]:
        """Return the paths of all files below `folder`, sorted."""

    @abc.abstractmethod
    def lengths(self, entries: Iterable[FileEntry]) -> dict[str, int]:
        """Return the lengths in bytes of those files of `entries` that exist, keyed by
        their relative paths.
        """

    @abc.abstractmethod
    def remove(self, paths: Iterable[Path]) -> list[int]:
        """Remove files, in the given order. Return the length in bytes of each removed
        file.
        """

    @abc.abstractmethod
    def commit(self, data: bytes) -> None:
        """Replace `index.json`. The caller holds the claim, and has compared the base.

        Raises:
            EdjeError: another process has replaced `index.json`, or it is not known
                whether `index.json` was replaced. Only an object store raises it.
        """

    @abc.abstractmethod
    def move_erased(self) -> None:
        """Move the files in `build/erased/` to the same paths in the index. Call this
        only after the commit of the erasure that wrote them.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Remove the temporary files of this place."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
