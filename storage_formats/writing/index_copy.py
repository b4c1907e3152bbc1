"""Copies one snapshot of an index between file systems and object stores, without decoding (SPEC.md section 12.4)."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from storage_formats.atomic import fsync_parent, fsync_path, json_bytes
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.format.checksum import crc32c, to_hex
from storage_formats.format.index_files import open_index_file, read_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import checked_chunks, named_by_manifest, open_remote, read_root
from storage_formats.format.object_store import (
    CHUNK_BYTES,
    WRITABLE_SCHEMES,
    Chunk,
    ObjectChangedError,
    ObjectFolder,
    ObjectStoreError,
    ObjectVersion,
)
from storage_formats.format.shard_table import EXCHANGED, FileEntry, read_shard_tables
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.writing.file_copy import copy_file
from storage_formats.writing.snapshots import DATA_FILE

_ROOT = "index.json"
_CLAIM = "build/copy.json"
_CHECKSUM = "crc32c"  # name of the object metadata
_MAX_SMALL_BYTES = 1 << 20


class CopyTarget(Protocol):
    """The destination of a copy. Several threads may call `copy` at the same time."""

    def copy(self, index: CommittedIndex, entry: FileEntry) -> bool:
        """Copy one file and compare the copy with `entry`. Return False if the destination already has the file."""
        ...


def files_to_copy(index: CommittedIndex) -> list[FileEntry]:
    """Return the entries of all files of a snapshot, apart from `index.json`.

    Raises:
        CorruptIndexError: a shard table is missing or damaged, or names a file that is not a data file of an index.
    """
    tables = read_shard_tables(index.root, index.manifest.shard_tables)
    named = [*(entry for _, entry in tables), *named_by_manifest(index.manifest)]
    for entry in named:
        if not DATA_FILE.fullmatch(entry.path) or _is_zarr_file(entry.path):
            raise CorruptIndexError(
                f"{index.location} lists the file {entry.path}, which is not a data file; do not trust this index"
            )
    zarr_files = [FileEntry(path, len(data), crc32c(data)) for path, data in _zarr_files(index).items()]
    return [*zarr_files, *named]


def _zarr_files(index: CommittedIndex) -> dict[str, bytes]:
    """Return the contents of each `zarr.json` of a snapshot, keyed by path.

    The files on disk are not read, because they describe the number of rows of the current snapshot.
    """
    layout = Layout(index.root)
    documents = zarr_documents(layout, index.manifest.spec)
    return {layout.relative(path): json_bytes(document) for path, document in documents.items()}


def _is_zarr_file(path: str) -> bool:
    return path.endswith("zarr.json")


def manifest_bytes(index: CommittedIndex) -> bytes:
    """Return the bytes of the `index.json` of the open snapshot.

    Raises:
        EdjeError: the index has changed since it was opened.
    """
    number, layout = index.manifest.snapshot.number, Layout(index.root)
    for path in (layout.manifest, layout.snapshot(number)):
        try:
            data = read_index_file(index.root, path)
        except OSError:
            continue
        if Manifest.parse(data, path) == index.manifest:
            return data
    raise EdjeError(f"{index.location} changed while it was being copied; run the copy again")


def _contents(index: CommittedIndex, entry: FileEntry) -> Generator[Chunk, None, None]:
    """Yield the contents of a file of `index` in pieces, and compare them with `entry`."""
    if _is_zarr_file(entry.path):
        yield _zarr_files(index)[entry.path]
        return
    if index.remote is not None:
        yield from checked_chunks(index.remote, entry)
        return
    path, crc, length = index.root / entry.path, 0, 0
    try:
        with open_index_file(index.root, path) as file:
            while piece := file.read(CHUNK_BYTES):
                crc, length = crc32c(piece, crc), length + len(piece)
                yield piece
    except OSError as error:
        raise CorruptIndexError(f"cannot read {path}: {error.strerror}; run 'edje-index verify'") from error
    if (length, crc) != (entry.bytes, entry.crc32c):
        raise CorruptIndexError(f"{path} is not the file that was committed: {EXCHANGED}")


class DirectoryTarget:
    """Copies files into a directory. Each file is flushed to the device before it appears at its path.

    Args:
        root: directory of the new index. `begin_index` has created it and its `zarr.json` files.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = Layout(root).staging

    def copy(self, index: CommittedIndex, entry: FileEntry) -> bool:
        path = self._root / entry.path
        if path.is_file() and path.stat().st_size == entry.bytes:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._staging / uuid.uuid4().hex  # removed with build/ if the process is killed
        try:
            if index.remote is None:
                copy_file(index.root, entry, temporary)
            else:
                with open(temporary, "xb") as file, contextlib.closing(_contents(index, entry)) as chunks:
                    file.writelines(chunks)
            fsync_path(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_parent(path)
        return True


@dataclass(frozen=True)
class RemoteTarget:
    """The destination of a running copy to an object store.

    Attributes:
        folder: objects of the destination.
        replaced: the `index.json` that the copy will replace. None if the destination has no `index.json`.
        replaced_manifest: the manifest in `replaced`. None if `replaced` is None.
        cleans: whether the copy finally deletes all objects that the new index does not need.
        owns_claim: whether this copy created `build/copy.json`. False if this copy resumes another copy.
    """

    folder: ObjectFolder
    replaced: ObjectVersion | None = None
    replaced_manifest: Manifest | None = None
    cleans: bool = False
    owns_claim: bool = False

    def copy(self, index: CommittedIndex, entry: FileEntry) -> bool:
        info, checksum = self.folder.info(entry.path), to_hex(entry.crc32c)
        if info is not None and info.size == entry.bytes and info.metadata.get(_CHECKSUM) == checksum:
            return False
        self.folder.put(entry.path, lambda: _contents(index, entry), length=entry.bytes, metadata={_CHECKSUM: checksum})
        return True

    def commit(self, index: CommittedIndex, entries: Sequence[FileEntry]) -> None:
        """Write `index.json` and delete `build/copy.json`. This ends the copy.

        Raises:
            EdjeError: another writer has changed the destination.
        """
        data = manifest_bytes(index)
        if self.replaced is not None and self.replaced.data != data:
            self._keep_replaced(index)
        try:
            self.folder.replace(_ROOT, data, self.replaced)
        except ObjectChangedError as error:
            if self.owns_claim:
                self.folder.delete([_CLAIM])
            raise EdjeError(
                f"{error} during the copy. The destination contains the complete index of that writer. To replace that "
                "index, run the copy again"
            ) from error
        if self.cleans:
            named = {entry.path for entry in entries}
            self.folder.delete([key for key in self.folder.list_keys() if _is_data(key) and key not in named])
        self.folder.delete([_CLAIM])

    def _keep_replaced(self, index: CommittedIndex) -> None:
        """Store the replaced `index.json` under `snapshots/`, so that readers can still open the replaced snapshot."""
        assert self.replaced is not None
        assert self.replaced_manifest is not None
        number = self.replaced_manifest.snapshot.number
        if number != index.manifest.snapshot.number:
            key = Layout(Path()).snapshot(number).as_posix()
            data = self.replaced.data
            metadata = {_CHECKSUM: to_hex(crc32c(data))}
            self.folder.put(key, lambda: (piece for piece in (data,)), length=len(data), metadata=metadata)


def _is_data(key: str) -> bool:
    return DATA_FILE.fullmatch(key) is not None or key.startswith("snapshots/")


def begin_remote_copy(
    index: CommittedIndex, folder: ObjectFolder, entries: Sequence[FileEntry], *, replace: bool
) -> RemoteTarget:
    """Begin to copy `index` to an object store, or resume an earlier copy of the same snapshot.

    Args:
        index: the snapshot to copy.
        folder: objects of the destination.
        entries: result of `files_to_copy`.
        replace: whether to remove an existing index first. The destination then has no index until the copy ends.

    Raises:
        UsageError: the destination contains another index and `replace` is False, or the destination is read-only.
        EdjeError: another copy to the destination is running or was stopped.
    """
    if folder.scheme not in WRITABLE_SCHEMES:
        raise UsageError(
            f"{folder.url} can only be read; write to a URL that begins with s3://, gs:// or az://", parameter="out"
        )
    claim = _claim(folder, to_hex(crc32c(manifest_bytes(index))), replace=replace)
    if replace:
        folder.delete([_ROOT])
        return RemoteTarget(folder, cleans=True, owns_claim=claim.is_new)
    try:
        version, manifest = read_root(folder)
        if version is None or manifest is None:
            return RemoteTarget(folder, cleans=claim.replaces, owns_claim=claim.is_new)
        if path := _conflict(folder, manifest, entries):
            raise UsageError(
                f"{folder.url} contains another index: its file {path} differs from the file in {index.location}; "
                "choose another destination. To overwrite the other index, copy with replace=True",
                parameter="out",
            )
    except BaseException:
        if claim.is_new:
            with contextlib.suppress(ObjectStoreError):
                folder.delete([_CLAIM])
        raise
    return RemoteTarget(folder, version, manifest, owns_claim=claim.is_new)


@dataclass(frozen=True)
class _Claim:
    """The object `build/copy.json` of a destination, which prevents copies of other snapshots.

    Attributes:
        is_new: whether this copy created the object. False if another copy of the same snapshot created it.
        replaces: argument `replace` of the copy that created the object.
    """

    is_new: bool
    replaces: bool


def _claim(folder: ObjectFolder, checksum: str, *, replace: bool) -> _Claim:
    """Create `build/copy.json`, or use the object of another copy of the same snapshot.

    Args:
        folder: objects of the destination.
        checksum: CRC-32C of the `index.json` to copy, which identifies the snapshot.
        replace: see `begin_remote_copy`.

    Raises:
        EdjeError: a copy of another snapshot is running or was stopped.
    """
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    # The microseconds make each claim unique.
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    claim = {"index": checksum, "replace": replace, "owner": owner, "created": created}
    try:
        folder.replace(_CLAIM, json.dumps(claim).encode(), None)
        return _Claim(is_new=True, replaces=replace)
    except ObjectChangedError:
        pass
    try:
        other = json.loads(folder.read(_CLAIM, _MAX_SMALL_BYTES).data)
        if other["index"] == checksum:
            return _Claim(is_new=False, replaces=other.get("replace") is True)
        holder = f"{other['owner']}, since {other['created']}"
    except FileNotFoundError:
        holder = "it has just ended"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        holder = "unknown owner"
    raise EdjeError(
        f"another copy to {folder.url} is running or was stopped ({holder}); wait until that copy ends. If its "
        f"process does not run any more, delete the object {folder.url_of(_CLAIM)}"
    )


def _conflict(folder: ObjectFolder, manifest: Manifest, entries: Sequence[FileEntry]) -> str | None:
    """Compare `entries` with the files of the index at the destination that have the same paths.

    Return the path of a file that differs, or None if all of these files are equal.
    """
    new = {entry.path: entry for entry in entries if not _is_zarr_file(entry.path)}
    old = open_remote(folder.url)
    if old.manifest != manifest:
        raise EdjeError(f"another writer changed {folder.url}; run the copy again")
    for entry in (*(entry for _, entry in read_shard_tables(old.root, manifest.shard_tables)), *manifest.ann_files):
        if new.get(entry.path, entry) != entry:
            return entry.path
    return None
