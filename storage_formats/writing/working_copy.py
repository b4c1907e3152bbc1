"""Changes of an index on an object store (SPEC.md section 12.4).

A change is made in a working copy, a directory that downloads missing files. Each time the change replaces `index.json`
there, the new snapshot is first committed on the object store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from storage_formats.atomic import make_directories, write_bytes_atomic
from storage_formats.change import kept_snapshots, named_files, write_array_shapes
from storage_formats.errors import EdjeError
from storage_formats.format.index_files import RemoteFiles, add_remote_files, forget_remote_files
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import (
    CLAIM,
    Mirror,
    absent,
    cache_directory,
    download_snapshots,
    named_by_manifest,
    open_remote,
    read_root,
)
from storage_formats.format.object_store import (
    IndexLocation,
    ObjectChangedError,
    ObjectFolder,
    ObjectVersion,
    UncertainWriteError,
    is_url,
)
from storage_formats.format.shard_table import FileEntry, read_shard_tables
from storage_formats.writing.remote_writes import (
    ROOT,
    holds_claim,
    is_data,
    put_file,
    put_root,
    refuse_read_only,
    release_claim,
    take_claim,
    zarr_entries,
)

_PARALLEL_UPLOADS = 8
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")
_SNAPSHOTS, _TABLES = "snapshots/", "manifest/shards-"


@dataclass(frozen=True)
class WorkingCopy:
    """A directory in which an index can be changed.

    Attributes:
        root: the directory of the index, or a working copy of an index on an object store.
        remote: the objects of the index; None for an index on a file system.
        writer: members that identify the claim of this change. None if the index is only read, or on a file system.
    """

    root: Path
    remote: ObjectFolder | None = None
    writer: Mapping[str, str] | None = None

    def remove_unnamed_objects(self, *, tables: bool = False) -> list[int]:
        """Remove the objects that no kept snapshot names. Return the length of each removed data file in bytes.

        An index on a file system does not change.

        Args:
            tables: whether to remove shard tables too, see `remove_unnamed_files`.

        Raises:
            EdjeError: the claim of this change is gone, so that the objects may belong to another writer.
        """
        if self.remote is None or self.writer is None:
            return []
        layout = Layout(self.root)
        kept = kept_snapshots(CommittedIndex.open(self.root))
        named = named_files(layout, kept) | {layout.relative(layout.snapshot(each.snapshot.number)) for each in kept}
        sizes = {key: size for key, size in self.remote.list_sizes().items() if is_data(key) and key not in named}
        snapshots = {key for key in sizes if key.startswith(_SNAPSHOTS)}
        data_keys = [key for key in sizes if key not in snapshots and (tables or not key.startswith(_TABLES))]
        if not holds_claim(self.remote, self.writer):
            raise EdjeError(
                f"the object {self.remote.url_of(CLAIM)}, which keeps other writers away, is gone or was replaced, so "
                "the objects that no snapshot needs were not deleted. Once no other process changes the index, run "
                f"'edje-index gc {self.remote.url}' to delete them"
            )
        self.remote.delete(sorted(snapshots))  # first, so that no kept snapshot lacks files
        self.remote.delete(data_keys)
        return [sizes[key] for key in data_keys]


@contextlib.contextmanager
def working_copy(location: IndexLocation, *, read_only: bool = False) -> Iterator[WorkingCopy]:
    """Yield a directory in which the index at `location` can be changed: `location` itself, unless it is a URL.

    Args:
        location: the index.
        read_only: True if the index is only read, also by functions that take no URL. The directory then lacks the
            manifests of earlier snapshots; `download_snapshots` downloads them.

    Raises:
        UsageError: there is no index at the URL, or it can only be read.
        EdjeError: another writer is changing the index at the URL, or has changed it before this change was committed.
            The index then holds the snapshot of the other writer.
    """
    if not is_url(location):
        yield WorkingCopy(Path(location))
        return
    if read_only:
        index = open_remote(str(location))
        assert index.remote is not None
        with _naming_url(index.root, index.remote.url):
            yield WorkingCopy(index.root, index.remote)
        return
    folder = ObjectFolder.open(str(location))
    refuse_read_only(folder, "index")
    if read_root(folder)[0] is None:
        raise absent(folder)
    root = cache_directory() / "changes" / hashlib.sha256(folder.url.encode()).hexdigest()[:32]
    with _locked(root, folder.url):
        writer = {"writer": _name_of(root)}
        take_claim(folder, writer)
        try:
            change = _RemoteChange.begin(folder, root, writer)
            with change.connected(), _naming_url(root, folder.url):
                yield WorkingCopy(root, folder, writer)
            _remove_token_files(root)
        finally:
            release_claim(folder, writer)


@contextlib.contextmanager
def _locked(root: Path, url: str) -> Iterator[None]:
    """Context manager that holds the lock of a working copy. Only one process of this machine changes the index."""
    make_directories(root.parent)
    with open(root.with_suffix(".lock"), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise EdjeError(
                f"process {file.read(200) or 'unknown'} is changing {url}; wait until the process ends, or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _name_of(root: Path) -> str:
    """Return the random name of a working copy, by which it knows its own claim."""
    path = root.with_suffix(".name")
    if not path.exists():
        write_bytes_atomic(path, uuid.uuid4().hex.encode())
    return path.read_text()


@contextlib.contextmanager
def _naming_url(root: Path, url: str) -> Iterator[None]:
    """Context manager that lets messages name the URL, because users do not know the working copy."""
    try:
        yield
    except EdjeError as error:
        message = str(error)
        if str(root) in message:  # the message may be about a full disk, so it also names the working copy
            error.args = (f"{message.replace(str(root), url)} (files on this machine: {root})", *error.args[1:])
        raise


class _RemoteChange:
    """A change that has begun: it has the claim, and `root` holds the current snapshot.

    Args:
        folder: objects of the index.
        root: the working copy.
        writer: members that identify the claim.
        version: current `index.json` of the index.
    """

    def __init__(self, folder: ObjectFolder, root: Path, writer: dict[str, str], version: ObjectVersion) -> None:
        self._folder = folder
        self._root = root
        self._writer = writer
        self._version = version

    @classmethod
    def begin(cls, folder: ObjectFolder, root: Path, writer: dict[str, str]) -> _RemoteChange:
        """Bring the working copy to the current snapshot. An unfinished change of this snapshot is kept."""
        version, manifest = read_root(folder)
        if version is None or manifest is None:
            raise absent(folder)
        change, layout = cls(folder, root, writer, version), Layout(root)
        if _bytes_of(layout.manifest) != version.data:
            # A process that died between its commit and the end of its change has left `next_manifest`.
            if _bytes_of(change._next_manifest) != version.data and root.exists():
                shutil.rmtree(root)
            write_bytes_atomic(layout.manifest, version.data)
        _remove_unfinished_downloads(layout)
        download_snapshots(folder, layout)
        write_array_shapes(layout, manifest.spec)
        return change

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Context manager in which the working copy downloads missing files and publishes new snapshots."""
        layout, folder = Layout(self._root), ObjectFolder(self._folder.url, self._folder.store)
        index = CommittedIndex(self._root, Manifest.load(self._root), folder)
        earlier = [Manifest.parse(path.read_bytes(), path) for path in sorted(layout.snapshot(0).parent.glob("*.json"))]
        entries = [entry for manifest in earlier for entry in named_by_manifest(manifest)]
        remote = RemoteFiles(folder, Mirror(index, entries).download, self._publish)
        add_remote_files(self._root, remote)
        try:
            yield
        finally:
            forget_remote_files(self._root, remote)

    @property
    def _next_manifest(self) -> Path:
        return self._root.with_suffix(".next")

    def _publish(self, data: bytes) -> None:
        """Put the new files of a snapshot, and commit its `index.json` with the contents `data`."""
        self._check_claim()
        index = CommittedIndex(self._root, Manifest.parse(data, self._folder.url_of(ROOT)))
        with ThreadPoolExecutor(_PARALLEL_UPLOADS) as pool:
            list(pool.map(lambda entry: put_file(self._folder, index, entry), self._new_files(index)))
        write_bytes_atomic(self._next_manifest, data)
        self._check_claim()  # without it, another writer may have removed the new files
        try:
            self._version = put_root(self._folder, data, self._version)
        except UncertainWriteError as error:
            raise EdjeError(
                f"the change may have been made: {error}. Once the store responds, run 'edje-index history "
                f"{self._folder.url}' to see whether it was made"
            ) from error
        except ObjectChangedError as error:
            raise EdjeError(
                f"{error} during this change. The snapshot of that writer is whole, and this change was not made; run "
                "the command again"
            ) from error

    def _check_claim(self) -> None:
        if not holds_claim(self._folder, self._writer):
            raise EdjeError(
                f"the object {self._folder.url_of(CLAIM)}, which keeps other writers away, is gone or was replaced. "
                "Nothing was changed; run the command again once no other process changes the index"
            )

    def _new_files(self, index: CommittedIndex) -> list[FileEntry]:
        """Return the entries of the files that `index` names and the committed snapshot does not."""
        old, new = Manifest.parse(self._version.data, self._folder.url_of(ROOT)), index.manifest
        tables = set(new.shard_tables) - set(old.shard_tables), set(old.shard_tables) - set(new.shard_tables)
        added, replaced = (
            {entry for _, entry in read_shard_tables(self._root, side)} | set(named_by_manifest(manifest))
            for side, manifest in zip(tables, (new, old), strict=True)
        )
        return [*sorted(added - replaced, key=lambda entry: entry.path), *zarr_entries(index)]


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove_unfinished_downloads(layout: Layout) -> None:
    """Remove the temporary files that a killed process left while it downloaded."""
    for path in (path for folder in layout.data_folders() for path in folder.rglob(".*")):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink()


def _remove_token_files(root: Path) -> None:
    """Remove the token files of a finished change. The object store has them, and they take much disk space."""
    layout = Layout(root)
    if layout.build.exists():  # an unfinished change needs its files
        return
    for path in layout.tokens.glob("*/c.*"):
        path.unlink()
