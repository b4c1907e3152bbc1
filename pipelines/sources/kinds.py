"""The two kinds of source: trees of files, which are directories, archives and single
files, and tables, which are lists of paths and Parquet files with images. Both can be
on a server.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from edje_index.images.decode import HEAD_BYTES, ImageError
from edje_index.inputs.containers import (
    ARCHIVES,
    PARQUET,
    Archive,
    Container,
    container_kind,
    members_with_sidecars,
)
from edje_index.inputs.names import (
    MAX_SIDECAR_BYTES,
    SIDECAR_SUFFIXES,
    file_name,
    has_input_suffix,
    is_hidden,
    join_sidecars,
)
from edje_index.inputs.ranges import open_file, open_ranged
from edje_index.inputs.refs import InputRef, display_path
from edje_index.inputs.tables import UNREADABLE, Table, add_captions
from edje_index.inputs.tars import Member
from pipelines.sources.base import (
    Source,
    file_input,
    holds_inputs,
    ignored_as,
    listed_input,
    lost_file,
    problem_of,
    read_head,
    unreadable,
)
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout
from storage_formats.remote.files import (
    UnreachableError,
    list_remote_folder,
    read_remote,
)
from storage_formats.remote.urls import is_url, scheme_of
from storage_formats.threads import ordered_map

_FILES_AT_ONCE = 16
# threads that list archives, and archives that are listed ahead
_PACKED_AT_ONCE = (8, 8)
# device and inode: the same for every path to a file or directory
_FileId = tuple[int, int]
# name of an input -> suffix of a metadata file -> name of the metadata file
_Sidecars = dict[bytes, dict[str, bytes]]

_NO_IMAGE = "(row without an image)"
# Tables with the metadata of the images in a directory, as Hugging Face Datasets reads
# them. Their column `_NAME` names the images.
_TABLES = (b"metadata.jsonl", b"metadata.csv")
_NAME = "file_name"
# endings of the names of files with metadata
_METADATA = (*map(os.fsencode, SIDECAR_SUFFIXES), *_TABLES)
# names in the directory that the cache of the Hugging Face Hub has for a repository
_HUB_CACHE = {b"blobs", b"refs", b"snapshots"}
# With patterns, a directory or an archive is read under at most this number of paths.
_MAX_PATHS = 16


class _Directory:
    """The contents of a directory.

    Attributes:
        files: sizes of the files in bytes, by name. The size of a local file is None.
        links: names in `files` of symbolic links. They include broken links with the
            suffix of an input.
        directories: names of the subdirectories. The value is True for a symbolic link.
        earlier: paths under which the same directory was listed before.
    """

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.files: dict[bytes, int | None] = {}
        self.links: set[bytes] = set()
        self.directories: dict[bytes, bool] = {}
        self.earlier: list[bytes] = []


class TreeSource(Source):
    """The images in a directory and its subdirectories, in an archive, or in one image
    file.

    In each directory, the files come first and the subdirectories follow, both sorted
    by the bytes of their names. Symbolic links are followed. Links to directories are
    read last, after the whole tree. If several paths lead to one file, only the first
    path is used that the patterns select. Of a repository in the cache of the Hugging
    Face Hub, the names in `snapshots` are used. Hidden files and directories are
    ignored.

    The files NAME.json and NAME.txt contain the metadata of the image NAME.jpg. A table
    metadata.jsonl or metadata.csv contains the metadata of the images that its column
    file_name names.

    Archives and Parquet files are read if their directory contains no image files, as
    in the output of img2dataset. Otherwise they are ignored and counted.

    Directories of indexes are ignored, because a build may write its index into its
    source.

    The members of an archive have the order of the archive. Their metadata are in
    other members, by the same names as in a directory. Members that cannot be read, for
    example links, become inputs with a problem such as "unsupported-member". If the
    archive is damaged, one input with the problem "truncated-archive",
    "damaged-archive" or "too-expensive" replaces all members after the damage.
    """

    def _iter_inputs(self) -> Iterator[InputRef]:
        if not self.is_directory:
            yield from self._members() if is_packed(self) else [file_input(self.path)]
            return
        # paths of each directory, archive and Parquet file that was read
        self._visited: dict[_FileId, list[bytes]] = {}
        # the files that were used through a link
        self._linked: set[_FileId] = set()
        # path of a photo in a metadata table, without links -> its values
        self._listed: dict[bytes, dict[Any, Any]] = {}
        # paths in `_listed` at which no file has been found so far
        self._without_file: set[bytes] = set()
        # directories whose metadata table is damaged
        self._damaged: list[bytes] = []
        pending = [self.path.rstrip(b"/") if is_url(self.path) else self.path]
        links = deque[bytes]()
        while pending or links:
            path = pending.pop() if pending else links.popleft()
            try:
                directory = self._list(path)
            except OSError as error:
                yield InputRef(display_path(path), path, problem=problem_of(error))
                continue
            yield from self._inputs(directory)
            below: list[bytes] = []
            for name, is_link in sorted(directory.directories.items()):
                (links if is_link else below).append(os.path.join(path, name))
            pending += reversed(below)
        if self._without_file:
            self.ignored.count("(metadata without a file)", len(self._without_file))

    def _list(self, path: bytes) -> _Directory:
        """Return the contents of a directory or URL. The result is empty for a
        directory that has been read before and for the directory of an index.
        """
        directory = _Directory(path)
        if is_url(path):
            contents = list_remote_folder(os.fsdecode(path)) or ({}, [])
            # Except on Azure, a directory on a server exists only if it contains files.
            # An empty list of contents is therefore an error of the server.
            if not any(contents) and scheme_of(self.spec) != "az":
                reason = "the server lists no files there"
                raise UnreachableError(errno.EHOSTUNREACH, reason, os.fsdecode(path))
            directory.files = {
                os.fsencode(name): size for name, size in contents[0].items()
            }
            directory.directories = dict.fromkeys(map(os.fsencode, contents[1]), False)
        else:
            self._scan(directory)
        for name in list(directory.directories):
            # On a server, a name may be empty.
            if not name or is_hidden(name):
                self.ignored.count("(hidden)")
                del directory.directories[name]
        # In the cache of the Hub, the files in `snapshots` are links to `blobs`, where
        # no file has its name.
        if directory.directories.keys() >= _HUB_CACHE:
            del directory.directories[b"blobs"]
            self.ignored.count("(folder seen)")
        is_index = (
            b"index.json" in directory.files
            and {b"manifest", b"rows", b"tokens"} <= directory.directories.keys()
        )
        if is_index or (
            b"build" in directory.directories
            and Layout(Path(os.fsdecode(path))).lock.exists()
        ):
            self.ignored.count("(index)")
            # Links can lead to images in the directory.
            if not is_url(path):
                self._visited[_file_id(path)].remove(path)
            return _Directory(path)
        return directory

    def _scan(self, directory: _Directory) -> None:
        """Add the contents of a local directory, unless it has been read before."""
        with os.scandir(directory.path) as listing:
            earlier = self._earlier_paths(directory.path)
            if earlier is None:
                self.ignored.count("(folder seen)")
                return
            directory.earlier = earlier
            for entry in listing:
                if entry.is_file(follow_symlinks=False):
                    directory.files[entry.name] = None
                # The name of a directory may be too long to be followed.
                elif entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path):
                    directory.directories[entry.name] = entry.is_symlink()
                elif os.path.exists(entry.path) and not os.path.isfile(entry.path):
                    self.ignored.count("(not a file)")
                elif (
                    os.path.exists(entry.path)
                    or has_input_suffix(entry.name, self.clips)
                    or entry.name.lower().endswith(_METADATA)
                ):
                    directory.files[entry.name] = None
                    directory.links.add(entry.name)
                else:
                    self.ignored.count("(broken link)")
                    link = display_path(entry.path)
                    self.hidden[link] = "it is a link without a target"

    def _inputs(self, directory: _Directory) -> Iterator[InputRef]:
        """Yield the inputs among the files of a directory, and then those in its
        archives and Parquet files.
        """
        listed = sorted(directory.files)
        tables = {
            name for name in listed if name in _TABLES and self._join(directory, name)
        }
        sidecars, used = join_sidecars(listed, self.clips)
        used |= tables
        names = [name for name in listed if name not in used]
        reads_packed = not holds_inputs(names, self.clips)
        files: list[bytes] = []
        packed: list[bytes] = []
        for name in names:
            path = os.path.join(directory.path, name)
            if container_kind(os.fsdecode(name)) is None or name.startswith(b"."):
                files.append(name)
            elif reads_packed:
                packed.append(path)
            else:
                files.append(name)
                reason = "it is not read, because images lie beside it: move them"
                self.hidden[display_path(path)] = reason
        read = functools.partial(self._file, directory, sidecars)
        refs: Iterable[InputRef | None] = map(read, files)
        if is_url(directory.path):
            refs = ordered_map(read, files, _FILES_AT_ONCE, 4 * _FILES_AT_ONCE)
        yield from (ref for ref in refs if ref is not None)
        sources: list[Source] = []
        # the earlier paths of each archive
        earlier: dict[bytes, list[bytes]] = {}
        for path in packed:
            try:
                paths = [] if is_url(path) else self._earlier_paths(path)
            except OSError as error:
                yield InputRef(display_path(path), path, problem=problem_of(error))
                continue
            if paths is None:
                self.ignored.count("(link seen)")
                continue
            earlier[path] = paths
            source = packed_source(os.fsdecode(path), self.column, clips=self.clips)
            source.unread = self.unread
            sources.append(source)
        for ref in iter_all(sources):
            member = ref.uri.removeprefix(display_path(ref.path))
            if self._is_used(member, earlier.get(ref.path, ())):
                self.ignored.count("(link seen)")
            else:
                yield ref
        for source in sources:
            for key, count in source.ignored.items():
                self.ignored.count(key, count)

    def _file(
        self,
        directory: _Directory,
        sidecars: _Sidecars,
        name: bytes,
    ) -> InputRef | None:
        """Return the input for a file. If the file is not an input, count it as ignored
        and return None.
        """
        path = os.path.join(directory.path, name)
        uri = display_path(path)
        size = directory.files.get(name)
        try:
            key = ignored_as(name, lambda: read_head(path, size), clips=self.clips)
            if key is not None:
                self.ignored.count(key, 1 + len(sidecars.get(name, ())))
                return None
            real = os.path.realpath(path) if self._listed else path
            self._without_file.discard(real)
            if not self._is_selected(uri):
                self.ignored.count("(excluded)")
                return None
            if self._is_repeated(directory, name):
                self.ignored.count("(link seen)")
                return None
        except (OSError, EOFError) as error:
            return InputRef(uri, path, problem=problem_of(error))
        contents = {
            suffix: _read_sidecar(os.path.join(directory.path, sidecar))
            for suffix, sidecar in sidecars.get(name, {}).items()
        }
        values = self._listed.pop(real, {})
        if path.startswith(tuple(self._damaged)):
            self.unread.add(uri)
        metadata = self._metadata(uri, contents, values)
        return file_input(path, size=size, metadata=metadata)

    def _join(self, directory: _Directory, name: bytes) -> bool:
        """Read the metadata table `name` of a directory, whose column `file_name` names
        the photos. Return False if the table has no such column.
        """
        table = Table(os.fsdecode(os.path.join(directory.path, name)), _NAME)
        try:
            table.check()
        except UsageError:
            return False
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise unreadable(table.path, error) from error
            # The table is damaged or a broken link, and may have had this column.
            self.ignored.count(UNREADABLE)
            self._damaged.append(os.path.join(directory.path, b""))
            return True
        before = self.ignored.get(UNREADABLE, 0)
        for entry in table.entries(self.ignored.count):
            values = entry.values
            if not values and entry.image is None:
                self.ignored.count(UNREADABLE)
                continue
            # As in Hugging Face Datasets, a path may have the backslashes of Windows.
            listed = str(entry.image or "").replace("\\", "/")
            photo = listed_input(os.path.normpath(listed), directory.path)
            if photo is not None:
                real = os.path.realpath(photo.path)
                self._without_file.add(real)
                first = self._listed.setdefault(real, values)
                if first is not values:
                    add_captions(first, values)
        if self.ignored.get(UNREADABLE, 0) > before:
            self._damaged.append(os.path.join(directory.path, b""))
        return True

    def _members(self) -> Iterator[InputRef]:
        """Yield the inputs in an archive."""
        name = file_name(self.spec).lower()
        kind = str(container_kind(name))
        refs: list[InputRef] = []
        try:
            with open_ranged(
                self.path, only_headers=name.endswith((".tar", ".zip"))
            ) as file:
                archive = ARCHIVES[kind](file)
                container = Container(kind, file.length)
                for member, contents in members_with_sidecars(archive, self.clips):
                    key = ignored_as(
                        member.name,
                        functools.partial(_head, archive, member),
                        clips=self.clips,
                    )
                    if key is not None:
                        self.ignored.count(key, 1 + len(contents))
                        continue
                    uri = f"{display_path(self.path)}!{display_path(member.name)}"
                    ref = InputRef(
                        uri,
                        self.path,
                        None if member.problem else container,
                        member.offset,
                        member.size,
                        problem=member.problem,
                        metadata=self._metadata(uri, contents, {}),
                    )
                    refs.append(ref)
        except (ImageError, OSError, ValueError, EOFError) as error:
            # The metadata of all members may be behind the damage.
            self.unread.update(ref.uri for ref in refs)
            refs.append(lost_file(self, error))
        yield from refs

    def _earlier_paths(self, path: bytes) -> list[bytes] | None:
        """Return the paths under which a directory or an archive was read before, and
        record `path`. Return None if it need not be read again.

        It is read again if there are patterns, because they may select other inputs
        under each path.
        """
        paths = self._visited.setdefault(_file_id(path), [])
        is_loop = any(path.startswith(os.path.join(other, b"")) for other in paths)
        if paths and (not self.patterns or is_loop or len(paths) == _MAX_PATHS):
            return None
        paths.append(path)
        return paths[:-1]

    def _is_used(self, name: str, paths: Iterable[bytes]) -> bool:
        """Return True if the input with this name is selected under one of `paths`."""
        return any(self._is_selected(display_path(path) + name) for path in paths)

    def _is_repeated(self, directory: _Directory, name: bytes) -> bool:
        """Return True if a file is used under another path, too. If `name` is a link,
        record its target as used.
        """
        path = os.path.join(directory.path, name)
        if name not in directory.links:
            if self._linked and _file_id(path) in self._linked:
                return True
            return self._is_used(f"/{display_path(name)}", directory.earlier)
        if not os.path.isfile(path):
            return False
        folder, target = os.path.split(os.path.realpath(path))
        earlier = self._visited.get(_file_id(folder), ())
        if (
            self._is_used(f"/{display_path(target)}", earlier)
            and ignored_as(target, lambda: read_head(path), clips=self.clips) is None
        ):
            return True
        is_repeated = _file_id(path) in self._linked
        self._linked.add(_file_id(path))
        return is_repeated


class TableSource(Source):
    """The images of a table (see `edje_index.inputs.tables`), in its order. The values
    of an entry are the metadata of its image.

    Relative paths start at the directory of the table, or at the working directory for
    standard input. A missing file becomes an input with the problem "missing". An entry
    without a valid path becomes an input with the problem "bad-list-line" and the uri
    "<table>#<number of the entry>". A row of a Parquet file of images without bytes and
    without a path is ignored and counted.

    Args:
        images_only: True for a Parquet file in a directory, see `Table`.
    """

    def __init__(
        self,
        spec: str,
        column: str | None = None,
        *,
        images_only: bool = False,
        clips: bool = False,
    ) -> None:
        super().__init__(spec, column=column, clips=clips)
        self.table = Table(os.fsdecode(self.path), column, images_only=images_only)

    def _iter_inputs(self) -> Iterator[InputRef]:
        table = self.table
        name = os.fsencode(file_name(os.fsdecode(self.path)))
        # Standard input has no directory.
        directory = os.path.dirname(name) or os.getcwdb()
        try:
            for entry in table.entries(self.ignored.count):
                ref: InputRef | None
                if entry.container is not None:
                    row = entry.number - 1
                    uri = f"{display_path(self.path)}!{table.column}/{row}"
                    ref = InputRef(uri, self.path, entry.container, row)
                elif table.has_bytes and not entry.image:
                    self.ignored.count(_NO_IMAGE)
                    continue
                else:
                    ref = listed_input(entry.image, directory)
                if ref is None:
                    uri = f"{display_path(self.path)}#{entry.number}"
                    ref = InputRef(uri, self.path, problem="bad-list-line")
                metadata = self._metadata(ref.uri, {}, entry.values)
                yield replace(ref, metadata=metadata)
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            if not (table.has_bytes or table.images_only):
                raise unreadable(self.spec, error) from error
            yield lost_file(self, error)


def _head(archive: Archive, member: Member) -> bytes:
    """Return the first bytes of a member, or no bytes if they are damaged."""
    with contextlib.suppress(ImageError):
        return archive.head(member.offset, min(HEAD_BYTES, member.size))
    return b""


def _read_sidecar(path: bytes) -> bytes | None:
    """Return the content of a metadata file; None if it is too large or cannot be read.
    Raise TransientInputError if it may be readable later, and SourceError if its
    content is not on this machine.
    """
    try:
        if is_url(path):
            return read_remote(os.fsdecode(path), MAX_SIDECAR_BYTES)
        fd, length = open_file(path)
        with open(fd, "rb", buffering=0) as file:
            return None if length > MAX_SIDECAR_BYTES else file.read(length)
    except OSError as error:
        problem_of(error)
        return None


def _file_id(path: bytes) -> _FileId:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def packed_source(
    spec: str,
    column: str | None = None,
    *,
    clips: bool = False,
) -> Source:
    """Return the source for an archive or a Parquet file of images. The file is opened
    when it is listed.

    `column` is the name of the column with the images, if the file is a Parquet file
    that has it. None selects the column by its content.
    """
    if container_kind(spec) == PARQUET:
        return TableSource(spec, column=column, images_only=True, clips=clips)
    return TreeSource(spec, clips=clips)


def iter_all(sources: Iterable[Source]) -> Iterator[InputRef]:
    """Yield the inputs of all sources in row order. Threads list consecutive archives
    and Parquet files ahead of the caller, because a thread that reads their headers
    mostly waits for the disk.
    """
    for are_packed, group in itertools.groupby(sources, is_packed):
        together = list(group)
        listed: Iterable[Iterable[InputRef]] = map(Source.iter_inputs, together)
        if are_packed and len(together) > 1:
            listed = ordered_map(
                lambda source: list(source.iter_inputs()), together, *_PACKED_AT_ONCE
            )
        yield from itertools.chain.from_iterable(listed)


def is_packed(source: Source) -> bool:
    """Return True for an archive or a Parquet file."""
    return container_kind(source.spec) is not None
