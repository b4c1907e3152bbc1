"""Sources that list files: a directory tree, or a single image file."""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.archives import ArchiveFile, is_archive_name, scan_ahead
from pipelines.sources.file_source import FileSource
from pipelines.sources.files import file_input, problem_of, read_head
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from pipelines.sources.selection import Ignored, has_input_suffix, ignored_as
from storage_formats.format.layout import Layout

_FileId = tuple[int, int]  # device and inode: the same for every path to a file or directory


@dataclass
class FolderSource(FileSource):
    """The images in a directory and its subdirectories.

    In each directory, the files come first and the subdirectories follow, both sorted by the bytes of their names.
    Symbolic links are followed. If several paths lead to one file, only the first path is used. Hidden files and
    directories are ignored. The files NAME.json and NAME.txt contain the metadata of the image NAME.jpg.

    Archives and Parquet files are read if their directory contains no image files, as in the output of img2dataset.
    Otherwise they are ignored and counted.

    Directories of indexes are ignored, because the output of a build may lie in its source.
    """

    kind: str = "folder"

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        yield from _Walk(self.ignored, self.clips).below(self.path)


@dataclass
class ImageFileSource(FileSource):
    """A source that is one image file or one clip."""

    kind: str = "image"

    def iter_inputs(self) -> Iterator[InputRef]:
        yield file_input(self.path)


@dataclass
class _Entries:
    """The names of the files, subdirectories and symbolic links in a directory."""

    files: list[bytes] = field(default_factory=list)
    directories: list[bytes] = field(default_factory=list)
    links: set[bytes] = field(default_factory=set)


class _Walk:
    """One pass over a directory tree. Each file and each directory is used once."""

    def __init__(self, ignored: Ignored, clips: bool) -> None:
        self._ignored = ignored
        self._clips = clips
        self._visited: set[_FileId] = set()
        self._linked: dict[_FileId, set[bytes]] = {}  # files already used through a link, by directory
        self._archives_seen: set[_FileId] = set()

    def below(self, root: bytes) -> Iterator[InputRef]:
        pending = [root]
        while pending:
            directory = pending.pop()
            try:
                identity = _file_id(directory)
                entries = _Entries() if identity in self._visited else self._list(directory)
            except OSError as error:
                yield InputRef(display_path(directory), directory, problem=problem_of(error))
                continue
            if identity in self._visited:
                self._ignored.count("(folder seen)")
            elif _is_index(directory, entries):
                self._ignored.count("(index)")
                entries = _Entries()
            self._visited.add(identity)
            yield from self._files(directory, identity, entries)
            pending += [os.path.join(directory, name) for name in sorted(entries.directories, reverse=True)]

    def _list(self, directory: bytes) -> _Entries:
        entries = _Entries()
        with os.scandir(directory) as listing:
            for entry in listing:
                if entry.is_symlink():
                    entries.links.add(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    entries.files.append(entry.name)
                elif not entry.is_dir(follow_symlinks=False):
                    self._ignored.count("(not a file)")
                elif entry.name.startswith(b"."):
                    self._ignored.count("(hidden)")
                else:
                    entries.directories.append(entry.name)
        return entries

    def _files(self, directory: bytes, identity: _FileId, entries: _Entries) -> Iterator[InputRef]:
        prefix = os.path.join(directory, b"")
        prefix_uri = display_path(prefix)
        linked = self._linked.get(identity, ())
        sidecars = find_sidecars(entries.files, self._clips)
        reads_archives = not holds_inputs([*entries.files, *entries.links], self._clips)
        archives: list[bytes] = []
        for name in sorted([*entries.files, *entries.links]):
            path = prefix + name
            link = name in entries.links
            if link and not self._leads_to_file(path, name, entries):
                continue
            if name in sidecars:
                continue
            if reads_archives and is_archive_name(os.fsdecode(name)) and not name.startswith(b"."):
                archives.append(path)
                continue
            ref = self._input(path, name, prefix_uri + display_path(name))
            if ref is None:
                continue
            if name in linked or (link and ref.problem is None and not self._is_new_target(path)):
                self._ignored.count("(link seen)")
            else:
                yield self._with_metadata(ref, sidecars)
        yield from self._archives(archives)

    def _archives(self, paths: list[bytes]) -> Iterator[InputRef]:
        sources: list[ArchiveFile] = []
        for path in paths:
            try:
                identity = _file_id(path)
            except OSError as error:
                yield InputRef(display_path(path), path, problem=problem_of(error))
                continue
            if identity in self._archives_seen:
                self._ignored.count("(link seen)")
            else:
                sources.append(ArchiveFile(os.fsdecode(path), clips=self._clips))
            self._archives_seen.add(identity)
        yield from scan_ahead(sources)
        for source in sources:
            self._ignored.add(source.ignored)

    def _with_metadata(self, ref: InputRef, sidecars: frozenset[bytes]) -> InputRef:
        stem = os.path.splitext(ref.path)[0]
        paths = {suffix: stem + suffix.encode() for suffix in SIDECAR_SUFFIXES}
        read = {
            suffix: functools.partial(_read_sidecar, path)
            for suffix, path in paths.items()
            if os.path.basename(path) in sidecars
        }
        return dataclasses.replace(ref, metadata=sidecar_values(read, self._ignored)) if read else ref

    def _input(self, path: bytes, name: bytes, uri: str) -> InputRef | None:
        try:
            ignored = ignored_as(name, lambda: read_head(path), clips=self._clips)
        except OSError as error:
            return InputRef(uri, path, problem=problem_of(error))
        if ignored is None:
            return file_input(path, uri)
        self._ignored.count(ignored)
        return None

    def _leads_to_file(self, link: bytes, name: bytes, entries: _Entries) -> bool:
        """Return True if the link leads to a file, or if the link is broken and its name has the suffix of an input."""
        if name.startswith(b"."):
            self._ignored.count("(hidden)")
            return False
        try:
            mode = os.stat(link).st_mode
        except OSError:
            if has_input_suffix(name, self._clips):
                return True
            self._ignored.count("(broken link)")
            return False
        if stat.S_ISDIR(mode):
            entries.directories.append(name)
        elif not stat.S_ISREG(mode):
            self._ignored.count("(not a file)")
        return stat.S_ISREG(mode)

    def _is_new_target(self, link: bytes) -> bool:
        """Record the target of a link. Return False if the target was recorded before."""
        directory, name = os.path.split(os.path.realpath(link))
        try:
            home = _file_id(directory)
            if home in self._visited and ignored_as(name, lambda: read_head(link), clips=self._clips) is None:
                return False
        except OSError:
            return True
        linked = self._linked.setdefault(home, set())
        if name in linked:
            return False
        linked.add(name)
        return True


def _is_index(directory: bytes, entries: _Entries) -> bool:
    """Return True if the files of a directory are an index, or a process is writing an index there."""
    if b"index.json" in entries.files and {b"manifest", b"rows", b"tokens"} <= set(entries.directories):
        return True
    return b"build" in entries.directories and Layout(Path(os.fsdecode(directory))).lock.exists()


def holds_inputs(names: Iterable[bytes], clips: bool) -> bool:
    """Return True if `names` contains the name of an image file, or with `clips` the name of a video clip."""
    return any(has_input_suffix(name, clips) and not name.startswith(b".") for name in names)


def find_sidecars(names: Sequence[bytes], clips: bool) -> frozenset[bytes]:
    """Return the names of the metadata files in a directory: NAME.json and NAME.txt, if there is an input NAME.jpg.

    With `clips`, NAME can also be the name of a clip such as NAME.mp4.
    """
    stems = {os.path.splitext(name)[0] for name in names if has_input_suffix(name, clips) and not name.startswith(b".")}
    suffixes = tuple(suffix.encode() for suffix in SIDECAR_SUFFIXES)
    return frozenset(name for name in names if name.endswith(suffixes) and os.path.splitext(name)[0] in stems)


def _read_sidecar(path: bytes) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size > MAX_SIDECAR_BYTES:
                raise ValueError("too many bytes of metadata")
            return file.read(MAX_SIDECAR_BYTES)
    except OSError as error:
        raise ValueError(problem_of(error)) from error


def _file_id(path: bytes) -> _FileId:
    status = os.stat(path)
    return status.st_dev, status.st_ino
