"""Copies one snapshot of an index between file systems and object stores, without decoding (SPEC.md section 12.4)."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from storage_formats.atomic import fsync_parent, fsync_path
from storage_formats.change import DATA_FILE
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.format.checksum import crc32c, to_hex
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import CLAIM, named_by_manifest, open_remote, read_root
from storage_formats.format.object_store import ObjectChangedError, ObjectFolder, ObjectVersion, UncertainWriteError
from storage_formats.format.shard_table import FileEntry, read_shard_tables
from storage_formats.writing.copying import copy_file
from storage_formats.writing.remote_writes import (
    ROOT,
    contents,
    holds_claim,
    is_data,
    is_zarr_file,
    put_file,
    put_root,
    refuse_read_only,
    release_claim,
    take_claim,
    zarr_entries,
)


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
        if not DATA_FILE.fullmatch(entry.path) or is_zarr_file(entry.path):
            raise CorruptIndexError(
                f"{index.location} lists the file {entry.path}, which is not a data file; do not trust this index"
            )
    return [*zarr_entries(index), *named]


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
                with open(temporary, "xb") as file, contextlib.closing(contents(index, entry)) as chunks:
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
        writer: members of `build/claim.json` that identify the copies of this snapshot.
        cleans: whether the copy finally deletes all objects that the new index does not need.
        owns_claim: whether this copy created `build/claim.json`. False if this copy resumes another copy.
    """

    folder: ObjectFolder
    writer: Mapping[str, str]
    replaced: ObjectVersion | None = None
    cleans: bool = False
    owns_claim: bool = False

    def copy(self, index: CommittedIndex, entry: FileEntry) -> bool:
        return put_file(self.folder, index, entry)

    def commit(self, index: CommittedIndex, entries: Sequence[FileEntry]) -> None:
        """Write `index.json` and delete `build/claim.json`. This ends the copy.

        Raises:
            EdjeError: another writer has changed the destination.
        """
        data = manifest_bytes(index)
        try:
            if not holds_claim(self.folder, self.writer) and not self._has_root(data):
                raise ObjectChangedError(f"another writer removed {self.folder.url_of(CLAIM)}")
            put_root(self.folder, data, self.replaced)
        except UncertainWriteError as error:
            raise EdjeError(
                f"the copy may be complete: {error}. Once the store responds, run the copy again, which then copies "
                "only what is missing"
            ) from error
        except ObjectChangedError as error:
            if self.owns_claim:
                release_claim(self.folder, self.writer)
            raise EdjeError(
                f"{error} during the copy, so the copy did not write index.json. Run the copy again once no other "
                "process writes to the destination"
            ) from error
        if self.cleans:
            self._clean({entry.path for entry in entries})
        release_claim(self.folder, self.writer)

    def _clean(self, named: Collection[str]) -> None:
        """Delete the data files that are not in `named`, unless another writer may already need some of them."""
        unnamed = [key for key in self.folder.list_keys() if is_data(key) and key not in named]
        if holds_claim(self.folder, self.writer):  # a copy of the same snapshot may have removed the shared claim
            self.folder.delete(unnamed)

    def _has_root(self, data: bytes) -> bool:
        """Return True if another copy of the same snapshot has ended and removed the claim that both share."""
        version, _ = read_root(self.folder)
        return version is not None and version.data == data


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
        EdjeError: another copy or change of the destination is running or was stopped.
    """
    refuse_read_only(folder, "out")
    writer = {"index": to_hex(crc32c(manifest_bytes(index)))}
    claim = take_claim(folder, writer, {"replace": replace})
    if replace:
        folder.delete([ROOT])
        return RemoteTarget(folder, writer, cleans=True, owns_claim=claim.is_new)
    try:
        version, manifest = read_root(folder)
        if version is None or manifest is None:
            cleans = claim.contents.get("replace") is True
            return RemoteTarget(folder, writer, cleans=cleans, owns_claim=claim.is_new)
        if change := _reverted_change(index, manifest):
            raise UsageError(
                f"{folder.url} {change}; choose another destination. To discard the changes of that index, copy with "
                "replace=True",
                parameter="out",
            )
        if path := _conflict(folder, manifest, entries):
            raise UsageError(
                f"{folder.url} contains another index: its file {path} differs from the file in {index.location}; "
                "choose another destination. To overwrite the other index, copy with replace=True",
                parameter="out",
            )
    except BaseException:
        if claim.is_new:
            release_claim(folder, writer)
        raise
    return RemoteTarget(folder, writer, version, owns_claim=claim.is_new)


def _reverted_change(index: CommittedIndex, manifest: Manifest) -> str | None:
    """Return what a copy of `index` would revert in the index that `manifest` describes. None if there is nothing."""
    source = _same_snapshot(index, manifest)
    if source is None:
        return f"is at snapshot {manifest.snapshot.number}, which {index.location} does not have"
    # A conversion and a new nearest-neighbour index keep the snapshot number.
    stored = {*source.spec.precisions, *index.manifest.spec.precisions}
    if lost := [name for name in manifest.spec.precisions if name not in stored]:
        return f"has the precision {', '.join(lost)}, which {index.location} does not have"
    if manifest.ann != source.ann and manifest.ann.get("kind", "none") != "none":
        return f"has a nearest-neighbour index that differs from that of {index.location}"
    return None


def _same_snapshot(index: CommittedIndex, manifest: Manifest) -> Manifest | None:
    """Return the manifest that `index` has of the snapshot of `manifest`, its open one or an earlier one.

    Return None if `index` lacks this snapshot.
    """
    number = manifest.snapshot.number
    source = index.manifest
    if number < source.snapshot.number:
        try:
            source = (
                CommittedIndex.open(index.root, number)
                if index.remote is None
                else open_remote(index.remote.url, number)
            ).manifest
        except EdjeError:
            return None
    return source if manifest.snapshot == source.snapshot else None


def _conflict(folder: ObjectFolder, manifest: Manifest, entries: Sequence[FileEntry]) -> str | None:
    """Compare `entries` with the files of the index at the destination that have the same paths.

    Return the path of a file that differs, or None if all of these files are equal.
    """
    new = {entry.path: entry for entry in entries if not is_zarr_file(entry.path)}
    old = open_remote(folder.url)
    if old.manifest != manifest:
        raise EdjeError(f"another writer changed {folder.url}; run the copy again")
    for entry in (*(entry for _, entry in read_shard_tables(old.root, manifest.shard_tables)), *manifest.ann_files):
        if new.get(entry.path, entry) != entry:
            return entry.path
    return None
