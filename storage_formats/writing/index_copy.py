"""Copies of one snapshot of an index between directories and object stores. Files are
copied byte by byte (SPEC.md section 12.4).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from storage_formats.atomic import (
    fsync_parent,
    make_directories,
    replacing,
)
from storage_formats.change import write_array_shapes
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError, cannot_read
from storage_formats.format.checksum import crc32c_file, to_hex
from storage_formats.format.file_check import (
    FileEntry,
    checked_pieces,
    difference,
    refuse,
)
from storage_formats.format.index_files import IndexFile, read_index_file
from storage_formats.format.layout import ROOT, is_data_file
from storage_formats.format.manifest import (
    REPLACED,
    SNAPSHOT_FILE,
    CommittedIndex,
    Manifest,
    kept_snapshots,
    named_files,
)
from storage_formats.format.place import Place
from storage_formats.format.prefix import CHECKSUM, Prefix, committed_chunks
from storage_formats.remote.objects import (
    CHUNK_BYTES,
    Chunk,
)


def manifest_bytes(index: CommittedIndex) -> bytes:
    """Return the bytes of the `index.json` of the snapshot at which `index` is open.

    Raises:
        EdjeError: the manifest of this snapshot was changed or removed after `index`
            was opened.
    """
    number = index.manifest.snapshot.number
    layout = index.layout
    for path in (layout.manifest, layout.snapshot(number)):
        try:
            data = read_index_file(index.root, path)
        except OSError:
            continue
        if Manifest.parse(data, path) == index.manifest:
            return data
    raise EdjeError(
        f"{index.location} changed while it was being copied; run the copy again"
    )


def copy_to_directory(index: CommittedIndex, entry: FileEntry, place: Place) -> bool:
    """Copy the file `entry` of `index` into the new index at `place`, and compare the
    copy with `entry`. Return False without a copy if the new index already has a file
    of this path and length.

    The copy is flushed to the device before it is renamed to its path.
    """
    path = place.root / entry.path
    if place.lengths([entry]).get(entry.path) == entry.bytes:
        return False
    make_directories(path.parent)
    # If this process is killed, the private file remains until `build/` is removed.
    with replacing(path, place.staging) as file:
        if index.remote is None:
            copy_file(index.root, entry, file)
        else:
            file.writelines(committed_chunks(index.remote, entry))
    fsync_parent(path)
    return True


@dataclass(frozen=True)
class RemoteCopy:
    """A running copy to an object store. `begin_remote_copy` yields an object of this
    class.

    Attributes:
        index: index to copy.
        place: destination.
        replaced: bytes of the `index.json` that the copy will replace. None if the
            destination has no index, or one that is discarded.
    """

    index: CommittedIndex
    place: Prefix
    replaced: bytes | None

    def put(self, entry: FileEntry) -> bool:
        """Copy the file `entry`, and compare the sent bytes with `entry`. Return False
        without a copy if the destination already has an object with the same path,
        length and CRC-32C.
        """
        info = self.place.folder.info(entry.path)
        if (
            info is not None
            and info.size == entry.bytes
            and info.metadata.get(CHECKSUM) == to_hex(entry.crc32c)
        ):
            return False
        self.place.upload(entry, lambda: file_contents(self.index, entry))
        return True

    def commit(self) -> None:
        """Write the `zarr.json` files of the destination, and replace its `index.json`.
        If the replaced `index.json` describes another snapshot, it is kept in
        `snapshots/`.

        Raises:
            EdjeError: another writer has changed the destination, or the store did not
                confirm the commit.
        """
        data = manifest_bytes(self.index)
        place = self.place
        if self.replaced not in (None, data):
            number = Manifest.parse(self.replaced, place.location).snapshot.number
            if number != self.index.manifest.snapshot.number:
                place.write(place.snapshot(number), self.replaced)
        write_array_shapes(place, self.index.spec)
        place.commit(data)

    def remove_others(self) -> None:
        """Delete each data file and each manifest in `snapshots/` of the destination
        that does not belong to the copied snapshot. Nothing is deleted if the claim of
        this copy is gone, because another writer may need the objects.
        """
        place = self.place
        named = {entry.path for entry in named_files(self.index)}
        named.update(map(place.relative, place.zarr_files(self.index.spec)))
        folder = place.folder
        unnamed = [
            key
            for key in folder.list_sizes()
            if (is_data_file(key) or SNAPSHOT_FILE.fullmatch(key)) and key not in named
        ]
        if place.is_claimed():
            # The manifests of snapshots are deleted first, so that a manifest never
            # names deleted files.
            unnamed.sort(key=lambda key: SNAPSHOT_FILE.fullmatch(key) is None)
            folder.delete(unnamed)


@contextlib.contextmanager
def begin_remote_copy(
    index: CommittedIndex, url: str, *, replace: bool = False
) -> Iterator[RemoteCopy]:
    """Begin to copy `index` to an object store. The copy sends only the files that are
    not at the destination.

    Args:
        replace: True allows the copy to discard snapshots and files of the index at the
            destination that `index` does not have. If there are any, readers find no
            index at the destination until the copy ends.

    Raises:
        UsageError: the destination is read-only, or has an index that the copy would
            discard.
        EdjeError: another process is changing the destination.
    """
    with Prefix.open(url) as place, place.claimed():
        if place.read(place.journal) is not None:
            if not replace:
                raise UsageError(
                    f"an unfinished change of {url} would be lost; finish or discard"
                    " it, or copy with replace=True",
                    parameter="out",
                )
            unfinished = place.names(place.build)
            place.remove(path for path in unfinished if path != place.claim)
        replaced = place.read(place.manifest)
        manifest: Manifest | None = None
        if replaced not in (None, REPLACED):
            try:
                manifest = Manifest.parse(replaced, place.folder.url_of(ROOT))
            except (CorruptIndexError, UsageError):
                # a damaged `index.json` can be replaced
                if not replace:
                    raise
        if manifest is not None and (lost := what_is_lost(index, url, manifest)):
            if not replace:
                raise UsageError(lost, parameter="out")
            manifest = None
        # `index.json` is overwritten and not deleted. An object store deletes without a
        # condition, so a delayed request could remove the `index.json` of the copy.
        if manifest is None and replaced is not None:
            place.commit(REPLACED)
            replaced = None
        yield RemoteCopy(index, place, replaced)


def what_is_lost(index: CommittedIndex, url: str, manifest: Manifest) -> str | None:
    """Return an error message if the index at `url` has a snapshot or a file that
    `index` does not have, because a copy of `index` would discard it. Return None if a
    copy would discard nothing.

    Args:
        manifest: current manifest of the index at `url`.
    """
    kept = kept_snapshots(index)
    if manifest.snapshot not in [each.snapshot for each in kept]:
        lost = f"is at snapshot {manifest.snapshot.number}"
    else:
        own_entries = {
            entry
            for each in kept
            for entry in _entries(dataclasses.replace(index, manifest=each))
        }
        opened = CommittedIndex.open(url)
        if opened.manifest != manifest:
            raise EdjeError(f"another writer changed {url}; run the copy again")
        lost_paths = sorted(entry.path for entry in _entries(opened) - own_entries)
        if not lost_paths:
            return None
        lost = f"has the file {lost_paths[0]}"
    return (
        f"{url} {lost}, which {index.location} does not have; choose another"
        " destination. To discard that index, copy with replace=True"
    )


def _entries(index: CommittedIndex) -> set[FileEntry]:
    """Return the entries of all data files of a snapshot except the shard tables. A
    conversion may replace a shard table without discarding a file that it lists.
    """
    return {*named_files(index)} - {*index.manifest.shard_tables}


def file_contents(index: CommittedIndex, entry: FileEntry) -> Iterator[Chunk]:
    """Yield the contents of the file `entry` of `index` in pieces. After the last
    piece, compare the length and the CRC-32C of all pieces with `entry`.

    Raises:
        CorruptIndexError: the file is missing or differs from `entry`.
    """
    if index.remote is not None:
        yield from committed_chunks(index.remote, entry)
        return
    path = index.root / entry.path
    try:
        with IndexFile(index.root, path) as file:
            pieces = iter(lambda: file.read(CHUNK_BYTES), b"")
            yield from checked_pieces(path, entry, pieces)
    except OSError as error:
        raise cannot_read(path, error) from error


def copy_file(root: Path, entry: FileEntry, target: BinaryIO) -> None:
    """Copy the committed file `entry` of the index at `root` to the new file `target`,
    and compare the copy with `entry`.

    If the file system can, the two files share their disk blocks (reflink).

    Raises:
        CorruptIndexError: the file cannot be read, or differs from `entry`.
    """
    path = root / entry.path
    try:
        opened = IndexFile(root, path)
    except OSError as error:
        raise cannot_read(path, error) from error
    with opened:
        length = os.fstat(opened.fileno()).st_size
        refuse(path, difference(entry, length))
        _copy_in_kernel(opened.fileno(), target.fileno(), length)
        # Copy the bytes that the kernel has not copied.
        shutil.copyfileobj(opened, target)
        target.flush()
    refuse(path, difference(entry, *crc32c_file(Path(target.name))))


def _copy_in_kernel(source: int, target: int, length: int) -> None:
    """Copy up to `length` bytes between two file descriptors with a system call. The
    call may copy fewer bytes, or none. Afterwards, the position of both descriptors is
    the end of the copied bytes.
    """
    # Only Linux has this call, and not every file system supports it. Its errors are
    # ignored, because the caller then copies the remaining bytes in the ordinary way,
    # which raises an error if the disk itself fails.
    with contextlib.suppress(AttributeError, OSError):
        while length and (count := os.copy_file_range(source, target, length)):
            length -= count
