"""A source that is a directory in an object store or on the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from edje_index.images.decode import HEAD_BYTES
from edje_index.images.inputs import InputRef
from edje_index.images.remote.access import list_remote_folder, read_remote, read_remote_range
from edje_index.images.remote.listing import RemoteFile
from pipelines.sources.archives import ArchiveFile, is_archive_name, scan_ahead
from pipelines.sources.file_source import FileSource
from pipelines.sources.files import problem_of
from pipelines.sources.folder import find_sidecars, holds_inputs
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from pipelines.sources.selection import Ignored, ignored_as
from pipelines.sources.specs import absolute_path

_FILES_AT_ONCE = 16


@dataclass
class RemoteFolderSource(FileSource):
    """The images in a remote directory and its subdirectories, in the order of `FolderSource`.

    The files NAME.json and NAME.txt contain the metadata of the image NAME.jpg. Archives and Parquet files are read if
    no image file lies in the same directory.
    """

    kind: str = "folder"

    def __post_init__(self) -> None:
        self.path = absolute_path(self.spec).rstrip(b"/")

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        pending = [os.fsdecode(self.path)]
        while pending:
            url = pending.pop()
            try:
                folder = list_remote_folder(url)
            except OSError as error:
                yield InputRef(url, os.fsencode(url), problem=problem_of(error))
                continue
            if folder is None:
                raise ValueError(f"the server of {url} does not list directories; give the URLs of files")
            yield from self._files(url, sorted(folder.files, key=lambda file: os.fsencode(file.name)))
            hidden = [name for name in folder.directories if name.startswith(".")]
            self.ignored.add({"(hidden)": len(hidden)} if hidden else {})
            pending += [f"{url}/{name}" for name in sorted({*folder.directories} - {*hidden}, reverse=True)]

    def _files(self, url: str, files: list[RemoteFile]) -> Iterator[InputRef]:
        names = [os.fsencode(file.name) for file in files]
        sidecars = find_sidecars(names, self.clips)
        reads_archives = not holds_inputs(names, self.clips)
        archives: list[ArchiveFile] = []
        others: list[RemoteFile] = []
        for file, name in zip(files, names, strict=True):
            if name in sidecars:
                continue
            if reads_archives and is_archive_name(file.name) and not name.startswith(b"."):
                archives.append(ArchiveFile(f"{url}/{file.name}", clips=self.clips))
            else:
                others.append(file)
        yield from self._images(url, others, sidecars)
        yield from scan_ahead(archives)
        for archive in archives:
            self.ignored.add(archive.ignored)

    def _images(self, url: str, files: list[RemoteFile], sidecars: frozenset[bytes]) -> Iterator[InputRef]:
        remaining = iter(files)
        with ThreadPoolExecutor(_FILES_AT_ONCE, "edje-list") as pool:
            while batch := list(itertools.islice(remaining, 4 * _FILES_AT_ONCE)):
                for ref, ignored in pool.map(functools.partial(_input, url, sidecars, self.clips), batch):
                    self.ignored.add(ignored)
                    if ref is not None:
                        yield ref


def _input(url: str, sidecars: frozenset[bytes], clips: bool, file: RemoteFile) -> tuple[InputRef | None, Ignored]:
    """Return (input, ignored entries) for a file. The input is None if the file is ignored."""
    uri, ignored = f"{url}/{file.name}", Ignored()
    ref = InputRef(uri, os.fsencode(uri), size=file.size)
    try:
        key = ignored_as(os.fsencode(file.name), functools.partial(_read_head, uri, file.size), clips=clips)
    except (OSError, EOFError) as error:
        return dataclasses.replace(ref, size=None, problem=problem_of(error)), ignored
    if key is not None:
        ignored.count(key)
        return None, ignored
    stem = os.path.splitext(file.name)[0]
    read = {
        suffix: functools.partial(_read_sidecar, f"{url}/{stem}{suffix}")
        for suffix in SIDECAR_SUFFIXES
        if os.fsencode(stem + suffix) in sidecars
    }
    return dataclasses.replace(ref, metadata=sidecar_values(read, ignored)) if read else ref, ignored


def _read_head(url: str, length: int) -> bytes:
    return read_remote_range(url, min(HEAD_BYTES, length), 0) if length else b""


def _read_sidecar(url: str) -> bytes:
    try:
        return read_remote(url, MAX_SIDECAR_BYTES)
    except OSError as error:
        raise ValueError(problem_of(error)) from error
