"""Copies of the files of an index between directories and object stores, byte by byte
(SPEC.md section 12.4). `begin_copy` and `Change.commit` do the rest of a copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from storage_formats.atomic import (
    fsync_parent,
    make_directories,
    replacing,
)
from storage_formats.errors import cannot_read
from storage_formats.format.checksum import crc32c_file, to_hex
from storage_formats.format.file_check import (
    FileEntry,
    check_file,
    checked_pieces,
    difference,
    refuse,
)
from storage_formats.format.index_files import IndexFile
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Place
from storage_formats.format.prefix import CHECKSUM, Prefix, committed_chunks
from storage_formats.remote.objects import (
    CHUNK_BYTES,
    Chunk,
)


def copy_to_place(index: CommittedIndex, place: Place, entry: FileEntry) -> bool:
    """Copy the file `entry` of `index` to the index at `place`, and compare the copied
    bytes with `entry`. Return False without a copy if `place` has the file already.

    A file in a directory counts as the same if it has the length and the CRC-32C of
    `entry`, and an object if its length and the CRC-32C in its metadata are equal.
    """
    if isinstance(place, Prefix):
        info = place.folder.info(entry.path)
        checksum = to_hex(entry.crc32c)
        if (
            info is not None
            and info.size == entry.bytes
            and info.metadata.get(CHECKSUM) == checksum
        ):
            return False
        place.upload(entry, lambda: file_contents(index, entry))
        return True
    path = place.root / entry.path
    if path.exists() and check_file(place.root, entry) is None:
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
        # Only Linux has this system call, not every file system supports it, and it may
        # copy fewer bytes. The remaining bytes are copied in the ordinary way, which
        # raises an error if the disk itself fails.
        with contextlib.suppress(AttributeError, OSError):
            while count := os.copy_file_range(opened.fileno(), target.fileno(), length):
                length -= count
        shutil.copyfileobj(opened, target)
        target.flush()
    refuse(path, difference(entry, *crc32c_file(Path(target.name))))
