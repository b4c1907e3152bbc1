"""A folder of images, and everything below it; or one image file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from edje_index.images.headers import HEAD_BYTES
from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.selection import Ignored, has_image_suffix, ignored_as

_FolderId = tuple[int, int]  # device and inode: the same however a folder is reached


@dataclass
class FolderSource:
    """Images below a folder: in each folder its files by name (bytes compared), then its folders by name.

    Links are followed, and what they lead to is counted once: a folder that is reached by several ways is
    walked at the first; of a file's link and the file itself the one that comes first is an input. Hidden files
    and folders are left out and counted. Memory grows with the longest single folder, the number of folders
    and the number of links to files.
    """

    spec: str
    kind: str = "folder"
    path: bytes = field(init=False)
    ignored: Ignored = field(init=False, default_factory=Ignored)

    def __post_init__(self) -> None:
        self.path = os.path.abspath(os.fsencode(self.spec))

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        yield from _Walk(self.ignored).below(self.path)


@dataclass
class ImageFileSource:
    """One image file."""

    spec: str
    kind: str = "image"
    path: bytes = field(init=False)
    ignored: Ignored = field(init=False, default_factory=Ignored)

    def __post_init__(self) -> None:
        self.path = os.path.abspath(os.fsencode(self.spec))

    def iter_inputs(self) -> Iterator[InputRef]:
        yield file_input(self.path)


def file_input(path: bytes, uri: str | None = None) -> InputRef:
    """The input that is the whole file at `path`; with a problem where it cannot be looked at or is no regular file."""
    uri = display_path(path) if uri is None else uri
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return InputRef(uri, path, problem=problem_of(error))
    if not stat.S_ISREG(status.st_mode):
        return InputRef(uri, path, problem="unreadable")
    return InputRef(uri, path, size=status.st_size)


def problem_of(error: Exception) -> str:
    """The reason that an operating system's error stands for."""
    return "missing" if isinstance(error, FileNotFoundError | NotADirectoryError) else "unreadable"


def read_head(path: bytes) -> bytes:
    """The first bytes of a regular file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read(HEAD_BYTES)


@dataclass
class _Entries:
    """What a folder holds, by kind; names only."""

    files: list[bytes] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    links: set[bytes] = field(default_factory=set)


class _Walk:
    """One pass over a tree."""

    def __init__(self, ignored: Ignored) -> None:
        self._ignored = ignored
        self._visited: set[_FolderId] = set()
        self._linked: dict[_FolderId, set[bytes]] = {}  # files already counted through a link, by their own folder

    def below(self, root: bytes) -> Iterator[InputRef]:
        pending = [root]
        while pending:
            folder = pending.pop()
            try:
                here = _folder_id(folder)
                entries = _Entries() if here in self._visited else self._list(folder)
            except OSError as error:
                yield InputRef(display_path(folder), folder, problem=problem_of(error))
                continue
            if here in self._visited:
                self._ignored.count("(folder seen)")
            self._visited.add(here)
            yield from self._files(folder, here, entries)
            pending += [os.path.join(folder, name) for name in sorted(entries.folders, reverse=True)]

    def _list(self, folder: bytes) -> _Entries:
        found = _Entries()
        with os.scandir(folder) as listing:
            for entry in listing:
                if entry.is_symlink():
                    found.links.add(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    found.files.append(entry.name)
                elif not entry.is_dir(follow_symlinks=False):
                    self._ignored.count("(not a file)")
                elif entry.name.startswith(b"."):
                    self._ignored.count("(hidden)")
                else:
                    found.folders.append(entry.name)
        return found

    def _files(self, folder: bytes, here: _FolderId, entries: _Entries) -> Iterator[InputRef]:
        prefix = os.path.join(folder, b"")
        prefix_uri = display_path(prefix)
        linked = self._linked.get(here, ())
        for name in sorted([*entries.files, *entries.links]):
            path = prefix + name
            link = name in entries.links
            if link and not self._leads_to_file(path, name, entries):
                continue
            ref = self._input(path, name, prefix_uri + display_path(name))
            if ref is None:
                continue
            if name in linked or (link and ref.problem is None and not self._is_new_target(path)):
                self._ignored.count("(link seen)")
            else:
                yield ref

    def _input(self, path: bytes, name: bytes, uri: str) -> InputRef | None:
        try:
            ignored = ignored_as(name, lambda: read_head(path))
        except OSError as error:
            return InputRef(uri, path, problem=problem_of(error))
        if ignored is None:
            return file_input(path, uri)
        self._ignored.count(ignored)
        return None

    def _leads_to_file(self, link: bytes, name: bytes, entries: _Entries) -> bool:
        """Whether a link has to be looked at as a file. A link to a folder joins the folders."""
        if name.startswith(b"."):
            self._ignored.count("(hidden)")
            return False
        try:
            mode = os.stat(link).st_mode
        except OSError:
            if has_image_suffix(name):
                return True
            self._ignored.count("(broken link)")
            return False
        if stat.S_ISDIR(mode):
            entries.folders.append(name)
        elif not stat.S_ISREG(mode):
            self._ignored.count("(not a file)")
        return stat.S_ISREG(mode)

    def _is_new_target(self, link: bytes) -> bool:
        """Note the file that a link leads to; False where that was counted, through another link or by itself."""
        folder, name = os.path.split(os.path.realpath(link))
        try:
            home = _folder_id(folder)
            if home in self._visited and ignored_as(name, lambda: read_head(link)) is None:
                return False
        except OSError:
            return True
        linked = self._linked.setdefault(home, set())
        if name in linked:
            return False
        linked.add(name)
        return True


def _folder_id(folder: bytes) -> _FolderId:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
