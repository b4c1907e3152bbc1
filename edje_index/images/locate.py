"""Finds a photo again by its row in an index."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.containers.container import (
    COMPRESSIONS,
    PARQUET,
    PARQUET_MAGIC,
    ZIP,
    ZIP_MAGIC,
    Container,
    split_uri,
)
from edje_index.images.containers.zips import ZipArchive
from edje_index.images.decode import HEAD_BYTES, ImageError
from edje_index.images.inputs import InputRef
from edje_index.images.ranges import RangedFile, open_ranged
from edje_index.images.remote.urls import is_remote
from edje_index.images.tar_members import Kind, iter_members

_MAX_MEMBERS = 1_000_000  # of one archive; the names of more would fill the memory


def locate(row: dict[str, Any]) -> InputRef:
    """Return where the photo of a row is now: a file, or a part of an archive or Parquet file.

    Args:
        row: the values of the columns `uri`, `uri_raw` and `size`.

    Raises:
        ImageError: the photo cannot be found, or lies in a compressed tar, where finding it takes too long.
        OSError: the file cannot be read.
    """
    uri, size = row["uri"], row["size"]
    path = row["uri_raw"] or os.fsencode(uri)
    if is_remote(path):
        raise ImageError(reason="not-a-local-path", detail="the photo is on a server; only local photos are shown")
    parts = split_uri(uri)
    if parts is not None and not os.path.isfile(path):
        path = row["uri_raw"] or os.fsencode(parts[0])
    if not os.path.isabs(path):
        raise ImageError(reason="not-a-local-path", detail="the index names the photo by a relative path")
    if not os.path.isfile(path):  # before `read_bytes`, which waits for a directory that has vanished
        raise ImageError(reason="missing", detail="no such file")
    if parts is None or path == os.fsencode(uri):
        return InputRef(uri, path, size=size)
    return _locate_member(uri, path, parts[1], size)


def _locate_member(uri: str, path: bytes, member: str, size: int) -> InputRef:
    with open(path, "rb", buffering=0) as file:
        head, length = file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
    if head.startswith(PARQUET_MAGIC):
        column, _, row = member.rpartition("/")
        if not row.isdecimal():
            raise ImageError(reason="missing", detail="the index names no row of the Parquet file")
        return InputRef(uri, path, offset=int(row), member=True, container=Container(PARQUET, length, column))
    if any(head.startswith(magic) for magic in COMPRESSIONS):
        raise ImageError(reason="too-expensive", detail="the photo is in a compressed tar; unpack the tar to see it")
    is_zip = head.startswith(ZIP_MAGIC)
    offset = _offset_in_archive(path, member.encode("utf-8", "surrogateescape"), size, is_zip=is_zip)
    return InputRef(uri, path, offset, size, member=True, container=Container(ZIP, length) if is_zip else None)


def _offset_in_archive(archive: bytes, member: bytes, size: int, *, is_zip: bool) -> int:
    status = os.stat(archive)
    offsets = _archive_offsets(archive, is_zip, status.st_mtime_ns, status.st_size)
    if (member, size) not in offsets:
        raise ImageError(reason="missing", detail="the archive has no such member")
    return offsets[member, size]


@functools.lru_cache(maxsize=4)
def _archive_offsets(archive: bytes, is_zip: bool, _modified: int, _size: int) -> dict[tuple[bytes, int], int]:
    """Return the offset of each regular member by (name, size). Of members with equal keys, the first wins."""
    offsets: dict[tuple[bytes, int], int] = {}
    with open_ranged(archive) as file:
        try:
            for name, size, offset in _zip_members(file) if is_zip else _tar_members(file):
                offsets.setdefault((name, size), offset)
                if len(offsets) > _MAX_MEMBERS:
                    break
        except ArchiveDamage:
            pass  # what precedes the damage can be read
    return offsets


def _tar_members(file: RangedFile) -> Iterator[tuple[bytes, int, int]]:
    members = (member for member in iter_members(file.pread) if member.kind == Kind.REGULAR)
    return ((member.name, member.size, member.offset) for member in members)


def _zip_members(file: RangedFile) -> Iterator[tuple[bytes, int, int]]:
    for member in ZipArchive(file).members():
        yield member.name.encode("utf-8", "backslashreplace"), member.size, member.offset
