"""Sources that are directory trees, local or on a server."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from edje_index.images.inputs import InputRef, display_path
from edje_index.images.remote.access import list_remote_folder, read_remote
from edje_index.images.remote.urls import is_remote
from pipelines.sources.archives import archive_source, is_archive_name, scan_ahead
from pipelines.sources.base import (
    Ignored,
    Source,
    file_input,
    has_input_suffix,
    ignored_as,
    ordered_map,
    problem_of,
    read_head,
)
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from storage_formats.format.layout import Layout

_FILES_AT_ONCE = 16
_FileId = tuple[int, int]  # device and inode: the same for every path to a file or directory


@dataclass
class _Entries:
    """The contents of a directory.

    Attributes:
        files: sizes of the files by name; None for local files.
        directories: names of the subdirectories.
        links: names of the symbolic links.
    """

    files: dict[bytes, int | None] = field(default_factory=dict)
    directories: list[bytes] = field(default_factory=list)
    links: set[bytes] = field(default_factory=set)


@dataclass
class FolderSource(Source):
    """The images in a directory and its subdirectories.

    In each directory, the files come first and the subdirectories follow, both sorted by the bytes of their names.
    Symbolic links are followed. If several paths lead to one file, only the first path is used. Hidden files and
    directories are ignored. The files NAME.json and NAME.txt contain the metadata of the image NAME.jpg.

    Archives and Parquet files are read if their directory contains no image files, as in the output of img2dataset.
    Otherwise they are ignored and counted.

    Directories of indexes are ignored, because the output of a build may lie in its source.
    """

    kind = "folder"

    def _iter_inputs(self) -> Iterator[InputRef]:
        self._visited: set[_FileId] = set()
        self._linked: dict[_FileId, set[bytes]] = {}  # files already used through a link, by directory
        self._archives_seen: set[_FileId] = set()
        list_directory = self._list_remote if is_remote(self.path) else self._list_local
        pending = [self.path.rstrip(b"/") if is_remote(self.path) else self.path]
        while pending:
            directory = pending.pop()
            try:
                entries = list_directory(directory)
            except OSError as error:
                yield InputRef(display_path(directory), directory, problem=problem_of(error))
                continue
            yield from self._inputs(directory, entries)
            pending += [os.path.join(directory, name) for name in sorted(set(entries.directories), reverse=True)]

    def _list_remote(self, directory: bytes) -> _Entries:
        listing = list_remote_folder(os.fsdecode(directory))
        if listing is None:
            raise ValueError(f"the server of {self.spec} does not list directories; give the URLs of files")
        files, directories = listing
        entries = _Entries({os.fsencode(name): size for name, size in files.items()})
        for name in directories:
            if name.startswith("."):
                self.ignored.count("(hidden)")
            else:
                entries.directories.append(os.fsencode(name))
        return entries

    def _list_local(self, directory: bytes) -> _Entries:
        entries = _Entries()
        identity = _file_id(directory)
        if identity in self._visited:
            self.ignored.count("(folder seen)")
            return entries
        with os.scandir(directory) as listing:
            for entry in listing:
                if entry.is_symlink():
                    entries.links.add(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    entries.files[entry.name] = None
                elif not entry.is_dir(follow_symlinks=False):
                    self.ignored.count("(not a file)")
                elif entry.name.startswith(b"."):
                    self.ignored.count("(hidden)")
                else:
                    entries.directories.append(entry.name)
        self._visited.add(identity)
        if _is_index(directory, entries):
            self.ignored.count("(index)")
            return _Entries()
        return entries

    def _inputs(self, directory: bytes, entries: _Entries) -> Iterator[InputRef]:
        sidecars = find_sidecars(entries.files, self.clips)
        names = sorted([*entries.files, *entries.links])
        reads_archives = not holds_inputs(names, self.clips)
        archives: list[bytes] = []
        files: list[bytes] = []
        for name in names:
            if name in entries.links and not self._leads_to_file(directory, name, entries):
                continue
            if name in sidecars:
                continue
            is_archive = reads_archives and is_archive_name(os.fsdecode(name)) and not name.startswith(b".")
            (archives if is_archive else files).append(name)
        read = functools.partial(_file, directory, entries.files, sidecars, self.clips)
        is_server = is_remote(directory)
        results = ordered_map(read, files, _FILES_AT_ONCE, 4 * _FILES_AT_ONCE) if is_server else map(read, files)
        for name, (ref, ignored) in zip(files, results, strict=True):
            self.ignored.add(ignored)
            if ref is None:
                continue
            if self._is_repeated(directory, name, ref, entries):
                self.ignored.count("(link seen)")
            else:
                yield ref
        yield from self._archives(directory, archives)

    def _archives(self, directory: bytes, names: list[bytes]) -> Iterator[InputRef]:
        sources: list[Source] = []
        for name in names:
            path = os.path.join(directory, name)
            try:
                identity = None if is_remote(path) else _file_id(path)
            except OSError as error:
                yield InputRef(display_path(path), path, problem=problem_of(error))
                continue
            if identity in self._archives_seen:
                self.ignored.count("(link seen)")
                continue
            if identity is not None:
                self._archives_seen.add(identity)
            sources.append(archive_source(os.fsdecode(path), clips=self.clips))
        yield from scan_ahead(sources)
        for source in sources:
            self.ignored.add(source.ignored)

    def _leads_to_file(self, directory: bytes, name: bytes, entries: _Entries) -> bool:
        """Return True if a link leads to a file, or if it is broken and its name has the suffix of an input."""
        if name.startswith(b"."):
            self.ignored.count("(hidden)")
            return False
        try:
            mode = os.stat(os.path.join(directory, name)).st_mode
        except OSError:
            if has_input_suffix(name, self.clips):
                return True
            self.ignored.count("(broken link)")
            return False
        if stat.S_ISDIR(mode):
            entries.directories.append(name)
        elif not stat.S_ISREG(mode):
            self.ignored.count("(not a file)")
        return stat.S_ISREG(mode)

    def _is_repeated(self, directory: bytes, name: bytes, ref: InputRef, entries: _Entries) -> bool:
        """Return True if the file of an input was used before, under another path. Record the target of a link."""
        if name not in entries.links:
            return bool(self._linked) and name in self._linked.get(_file_id(directory), ())
        if ref.problem is not None:
            return False
        target_directory, target = os.path.split(os.path.realpath(ref.path))
        try:
            home = _file_id(target_directory)
            read = functools.partial(read_head, ref.path)
            if home in self._visited and ignored_as(target, read, clips=self.clips) is None:
                return True
        except OSError:
            return False
        used = self._linked.setdefault(home, set())
        is_repeated = target in used
        used.add(target)
        return is_repeated


def _file(
    directory: bytes, sizes: dict[bytes, int | None], sidecars: frozenset[bytes], clips: bool, name: bytes
) -> tuple[InputRef | None, Ignored]:
    """Return (input, ignored entries) for a file. The input is None if the file is ignored."""
    path, size, ignored = os.path.join(directory, name), sizes.get(name), Ignored()
    try:
        key = ignored_as(name, functools.partial(read_head, path, size), clips=clips)
    except (OSError, EOFError) as error:
        return InputRef(display_path(path), path, problem=problem_of(error)), ignored
    if key is not None:
        ignored.count(key)
        return None, ignored
    ref = file_input(path) if size is None else InputRef(display_path(path), path, size=size)
    stem = os.path.splitext(name)[0]
    read = {
        suffix: functools.partial(_read_sidecar, os.path.join(directory, stem + suffix.encode()))
        for suffix in SIDECAR_SUFFIXES
        if stem + suffix.encode() in sidecars
    }
    return replace(ref, metadata=sidecar_values(read, ignored)) if read else ref, ignored


def _read_sidecar(path: bytes) -> bytes:
    try:
        if is_remote(path):
            return read_remote(os.fsdecode(path), MAX_SIDECAR_BYTES)
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size > MAX_SIDECAR_BYTES:
                raise ValueError("too many bytes of metadata")
            return file.read(MAX_SIDECAR_BYTES)
    except OSError as error:
        raise ValueError(problem_of(error)) from error


def _is_index(directory: bytes, entries: _Entries) -> bool:
    """Return True if the files of a directory are an index, or a process is writing an index there."""
    if b"index.json" in entries.files and {b"manifest", b"rows", b"tokens"} <= set(entries.directories):
        return True
    return b"build" in entries.directories and Layout(Path(os.fsdecode(directory))).lock.exists()


def holds_inputs(names: Iterable[bytes], clips: bool) -> bool:
    """Return True if `names` contains the name of an image file, or with `clips` the name of a video clip."""
    return any(has_input_suffix(name, clips) and not name.startswith(b".") for name in names)


def find_sidecars(names: Iterable[bytes], clips: bool) -> frozenset[bytes]:
    """Return the names of the metadata files in a directory: NAME.json and NAME.txt, if there is an input NAME.jpg.

    With `clips`, NAME can also be the name of a clip such as NAME.mp4.
    """
    stems = {os.path.splitext(name)[0] for name in names if has_input_suffix(name, clips) and not name.startswith(b".")}
    suffixes = tuple(suffix.encode() for suffix in SIDECAR_SUFFIXES)
    return frozenset(name for name in names if name.endswith(suffixes) and os.path.splitext(name)[0] in stems)


def _file_id(path: bytes) -> _FileId:
    status = os.stat(path)
    return status.st_dev, status.st_ino
