"""The files that `verify_index` checks: those in a directory, or copies of objects of an object store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from storage_formats.atomic import write_bytes_atomic
from storage_formats.change import DATA_FILE, kept_snapshots, named_files
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.index_files import (
    RemoteFiles,
    add_remote_files,
    check_inside,
    download_missing,
    forget_remote_files,
    open_index_file,
    read_index_file,
)
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import MAX_MANIFEST_BYTES, CommittedIndex, Manifest
from storage_formats.format.mirror import (
    CLAIM,
    absent,
    cache_directory,
    download_snapshots,
    named_by_manifest,
    read_root,
)
from storage_formats.format.object_store import CHUNK_BYTES, WEB_SCHEMES, IndexLocation, ObjectFolder, is_url
from storage_formats.format.shard_table import FileEntry
from storage_formats.shard_check import Problem
from storage_formats.writing.remote_writes import overwrite_file

_REQUESTS = 8  # of all threads together; each takes the memory of a chunk
_MAX_UNLISTED_BYTES = 1 << 20
_ABANDONED_SECONDS = 86400.0
_PREFIX, _LOCK = "verify-", ".lock"


@dataclass(frozen=True)
class VerifiedFiles:
    """The files of an index in a directory.

    Attributes:
        root: the directory. For an index on an object store, missing files are downloaded to it, also damaged ones.
        stray_message: message about a file that does not belong to the index.
    """

    root: Path
    stray_message: str = "does not belong to this index; delete the file"

    def version(self) -> tuple[bytes, list[str]]:
        """Return the current contents of `index.json`, and the relative paths of the earlier snapshots."""
        layout = Layout(self.root)
        return read_index_file(self.root, layout.manifest), _paths_of_snapshots(layout)

    def named(self, manifest: Manifest) -> set[str]:
        """Return the relative paths of all files that a kept snapshot names. `manifest` is the current snapshot.

        Raises:
            CorruptIndexError: a snapshot cannot be read.
        """
        layout = Layout(self.root)
        try:
            manifests = kept_snapshots(CommittedIndex(layout.root, manifest))
        except UsageError as error:  # the format version of a snapshot, for example
            raise CorruptIndexError(str(error)) from error
        return named_files(layout, manifests)

    @contextlib.contextmanager
    def at_hand(self, files: Mapping[str, FileEntry]) -> Iterator[None]:
        """Context manager in which `files`, file entries by relative path, are on this machine. Thread-safe."""
        yield

    def abandon(self) -> None:
        """Let the downloads of other threads fail, because the verification ends early."""

    def length(self, path: str) -> int:
        """Return the length of the file with the relative path `path` in bytes. Raises OSError like `open`."""
        with open_index_file(self.root, self.root / path) as file:
            return os.fstat(file.fileno()).st_size

    def names(self) -> list[str]:
        """Return the relative paths of all files in the data folders."""
        layout = Layout(self.root)
        paths = (path for folder in layout.data_folders() for path in sorted(folder.rglob("*")))
        return [layout.relative(path) for path in paths if not path.is_dir()]

    def is_changing(self) -> bool:
        """Return True if the index has an unfinished change, whose files may be there already."""
        return Layout(self.root).build.exists()

    def describe(self, problem: Problem) -> Problem:
        """Return `problem` with a message that names the index as the caller does."""
        return problem

    def publish(self, entries: Iterable[FileEntry]) -> None:
        """Replace the damaged files of the index with the files that were repaired in `root`."""


@dataclass(frozen=True)
class _Objects(VerifiedFiles):
    folder: ObjectFolder = field(kw_only=True)
    entries: dict[str, FileEntry] = field(kw_only=True)
    downloads: ThreadPoolExecutor = field(kw_only=True)
    disk: _Disk = field(kw_only=True)

    def version(self) -> tuple[bytes, list[str]]:
        below = Layout(self.root).relative(Layout(self.root).snapshot(0).parent)
        return self.folder.read("index.json", MAX_MANIFEST_BYTES).data, sorted(self.folder.list_sizes(below))

    def named(self, manifest: Manifest) -> set[str]:
        layout = Layout(self.root)
        with _writing_to(self.root):
            download_snapshots(self.folder, layout)
        for path in _paths_of_snapshots(layout):
            with contextlib.suppress(CorruptIndexError, UsageError):
                earlier = Manifest.parse((self.root / path).read_bytes(), path)
                self.entries.update((entry.path, entry) for entry in named_by_manifest(earlier))
        return super().named(manifest)

    @contextlib.contextmanager
    def at_hand(self, files: Mapping[str, FileEntry]) -> Iterator[None]:
        named = {path: entry for path, entry in files.items() if DATA_FILE.fullmatch(path)}  # the others lead elsewhere
        with self.disk.reserved(sum(entry.bytes for entry in named.values())):
            self.entries.update(named)
            try:
                download_missing(self.root, [self.root / path for path in named])
                yield
            finally:
                for path in named:
                    self.entries.pop(path, None)
                    (self.root / path).unlink(missing_ok=True)

    def abandon(self) -> None:
        self.downloads.shutdown(wait=False, cancel_futures=True)

    def length(self, path: str) -> int:
        if (info := self.folder.info(path)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.folder.url_of(path))
        return info.size

    def names(self) -> list[str]:
        folders = tuple(f"{Layout(self.root).relative(folder)}/" for folder in Layout(self.root).data_folders())
        return sorted(key for key in self.folder.list_keys() if key.startswith(folders))

    def is_changing(self) -> bool:
        return self.folder.info(CLAIM) is not None

    def describe(self, problem: Problem) -> Problem:
        return replace(problem, message=problem.message.replace(str(self.root), self.folder.url))

    def publish(self, entries: Iterable[FileEntry]) -> None:
        index = CommittedIndex(self.root, Manifest.load(self.root))
        for entry in entries:
            overwrite_file(self.folder, index, entry)


@contextlib.contextmanager
def verified_files(location: IndexLocation) -> Iterator[VerifiedFiles]:
    """Context manager that yields the files of the index at `location`, a directory or a URL.

    Raises:
        UsageError: there is no index at the URL, its objects cannot be listed, or the cache cannot be written.
        CorruptIndexError: the `index.json` at the URL is damaged.
    """
    if not is_url(location):
        yield VerifiedFiles(Path(location))
        return
    folder = ObjectFolder.open(str(location))
    if folder.scheme in WEB_SCHEMES:
        raise UsageError(
            f"{folder.url} cannot be checked, because a web server does not list files; copy the index to a directory, "
            "which checks every file, or give a URL that begins with s3://, gs:// or az://"
        )
    version, manifest = read_root(folder)
    if version is None or manifest is None:
        raise absent(folder)
    with _temporary_directory() as root, ThreadPoolExecutor(_REQUESTS, "edje-download") as downloads:
        with _writing_to(root):
            write_bytes_atomic(root / "index.json", version.data)
        entries = {entry.path: entry for entry in named_by_manifest(manifest)}
        remote = RemoteFiles(folder, functools.partial(_download, folder, Layout(root), entries, downloads))
        add_remote_files(root, remote)
        try:
            message = "does not belong to this index; run 'edje-index gc', or delete the object"
            disk = _Disk(root, folder.url)
            yield _Objects(root, message, folder=folder, entries=entries, downloads=downloads, disk=disk)
        except CorruptIndexError as error:  # its message names a file of `root`, which users do not know
            error.args = (str(error).replace(str(root), folder.url), *error.args[1:])
            raise
        finally:
            forget_remote_files(root, remote)


class _Disk:
    """Lets several threads use the disk with the directory `root`, if there is room for the files of all of them."""

    def __init__(self, root: Path, url: str) -> None:
        self._root = root
        self._url = url
        self._reserved = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserved(self, need: int) -> Iterator[None]:
        """Context manager in which the caller may write `need` bytes. Waits for other threads if that makes room.

        Raises:
            UsageError: the disk has no room, although no other thread uses it.
        """
        with self._changed:
            while self._reserved and self._reserved + need > shutil.disk_usage(self._root).free:
                self._changed.wait()
            if need > (free := shutil.disk_usage(self._root).free):
                raise UsageError(
                    f"the check of {self._url} needs {need} bytes of disk, but only {free} are free at {self._root}; "
                    "free some space, or set EDJE_CACHE to a directory on a larger disk"
                )
            self._reserved += need
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= need
                self._changed.notify_all()


def _paths_of_snapshots(layout: Layout) -> list[str]:
    return sorted(layout.relative(path) for path in layout.snapshot(0).parent.glob("*.json"))


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    """Context manager that makes a directory in the cache. Also removes directories that killed processes have left."""
    parent = cache_directory()
    with contextlib.ExitStack() as opened:
        with _writing_to(parent):
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for other in parent.glob(f"{_PREFIX}*"):
                _remove_abandoned(other)
            root = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent))).resolve()
            lock = opened.enter_context(open(root / _LOCK, "ab"))
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield root


def _remove_abandoned(root: Path) -> None:
    """Remove the directory of a killed process. A running process holds the lock of its directory."""
    with contextlib.suppress(OSError):
        if time.time() - root.stat().st_mtime > _ABANDONED_SECONDS:  # a new directory may have no lock yet
            with open(root / _LOCK, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root)


@contextlib.contextmanager
def _writing_to(path: Path) -> Iterator[None]:
    """Context manager that converts errors of the local disk to UsageError, because they are no damage of the index."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to {path}: {error.strerror}; free some space, or set EDJE_CACHE to another directory"
        ) from error


def _download(
    folder: ObjectFolder,
    layout: Layout,
    entries: Mapping[str, FileEntry],
    downloads: ThreadPoolExecutor,
    paths: list[Path],
) -> None:
    """Download objects as they are. An object with a wrong length becomes an empty sparse file of its length.

    Args:
        folder: the objects of the index.
        layout: layout of the directory for the files.
        entries: the known file entries, by relative path.
        downloads: the threads that send the requests.
        paths: the files to download.
    """
    for path in paths:
        key = layout.relative(check_inside(layout.root, path))
        info, entry = folder.info(key), entries.get(key)
        if info is None:
            continue  # opening the file raises FileNotFoundError
        is_expected = info.size == entry.bytes if entry else info.size <= _MAX_UNLISTED_BYTES
        with _writing_to(layout.root), _new_file(path) as file:
            if is_expected:
                copy = functools.partial(_copy, folder, key, file.fileno(), info.size)
                _copy_chunks(copy, info.size, downloads)
            else:
                with contextlib.suppress(OSError):  # longer than any file; its length stays wrong
                    os.truncate(file.fileno(), info.size)


def _new_file(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "xb")


def _copy_chunks(copy: Callable[[int], None], length: int, downloads: ThreadPoolExecutor) -> None:
    """Call `copy` with the start of each chunk, in the threads of `downloads`. No call is running afterwards.

    The caller closes the file next. A call that is still running would write to any file that gets the same descriptor.
    """
    chunks: list[Future[None]] = []
    try:
        for start in range(0, length, CHUNK_BYTES):
            chunks.append(downloads.submit(copy, start))
        for chunk in chunks:
            chunk.result()
    finally:
        wait([chunk for chunk in chunks if not chunk.cancel()])  # `wait` may never return for a cancelled one


def _copy(folder: ObjectFolder, key: str, descriptor: int, length: int, start: int) -> None:
    """Copy the bytes of an object from `start` on to a file, at most `CHUNK_BYTES`."""
    try:
        data = folder.read_range(key, start, min(length, start + CHUNK_BYTES))
    except (FileNotFoundError, EOFError):  # replaced in the meantime; its checksum will be wrong
        return
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
