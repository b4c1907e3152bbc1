"""Lists the members of a tar archive and the byte offset of each member's data.

This module does not iterate over a `tarfile.TarFile`, for three reasons. `TarFile` ends without an error at a damaged
header. It reads only the first of several concatenated archives. It keeps all members in memory.
"""

from __future__ import annotations

import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import IO, cast

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.ranges import ReadAt

_MAX_READ = 1 << 20  # bytes of one header; longer pax records and names are damage
_MAX_SIZE = 1 << 62  # bytes of one member; larger sizes exceed the range of file offsets
_ZEROS = bytes(tarfile.BLOCKSIZE)


class Kind(Enum):
    """The kinds of archive members."""

    REGULAR = "regular"
    LINK = "link"
    DIRECTORY = "directory"
    SPARSE = "sparse"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TarMember:
    """One member of an archive.

    Attributes:
        name: name in the archive.
        kind: kind of the member.
        offset: position of the member's data in the archive, in bytes.
        size: size of the member's data in bytes. The data of a sparse member differ from the content of the file.
    """

    name: bytes
    kind: Kind
    offset: int
    size: int


def iter_members(read_at: ReadAt) -> Iterator[TarMember]:
    """Yield the members of an archive in order. Only headers are read.

    Args:
        read_at: reads a byte range of the archive.

    Raises:
        ArchiveDamage: the archive is damaged after the last yielded member. The reason is "truncated-archive" if the
            file ends before the end-of-archive marker, and "damaged-archive" if a header is invalid.
        OSError: the file cannot be read.
    """
    start: int | None = 0
    while start is not None:
        end = yield from _archive_members(read_at, start)
        start = _next_archive(read_at, end)


class _HeaderFile:
    """File object from which `tarfile` reads headers.

    A damaged header can request a long read, which raises ArchiveDamage.
    """

    name = None
    mode = "rb"

    def __init__(self, read_at: ReadAt, position: int) -> None:
        self._read_at = read_at
        self._position = position
        self.reached_end = False

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise ArchiveDamage(
                reason="damaged-archive", detail=f"the header at byte {self._position} has the invalid size {size}"
            )
        data = self._read_at(size, self._position)
        self.reached_end |= len(data) < size
        self._position += len(data)
        return data


def _archive_members(read_at: ReadAt, start: int) -> Generator[TarMember, None, int]:
    """Yield the members of the archive that starts at the offset `start`. Return the offset after the last member."""
    file = _HeaderFile(read_at, start)
    end = start
    try:
        archive = tarfile.TarFile(fileobj=cast(IO[bytes], file), encoding="utf-8", errors="surrogateescape")
        while True:
            file.seek(end)
            info = tarfile.TarInfo.fromtarfile(archive)
            yield _member(info)
            if archive.offset <= end:
                raise ArchiveDamage(
                    reason="damaged-archive", detail=f"the header at byte {end} leads to an earlier byte"
                )
            end = archive.offset
    except (tarfile.TarError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        # `tarfile` raises such an error at the end marker too; the caller checks for the marker.
        if file.reached_end:
            raise ArchiveDamage(
                reason="truncated-archive", detail=f"the file ends inside the header at byte {end}"
            ) from error
    return end


def _member(info: tarfile.TarInfo) -> TarMember:
    name = info.name.encode("utf-8", "surrogateescape")
    if not 0 <= info.size < _MAX_SIZE:
        raise ArchiveDamage(
            reason="damaged-archive", detail=f"the member at byte {info.offset} has the invalid size {info.size}"
        )
    if b"\0" in name:
        raise ArchiveDamage(
            reason="damaged-archive", detail=f"the member at byte {info.offset} has the invalid name {name[:100]!r}"
        )
    return TarMember(name, _kind(info), info.offset_data, info.size)


def _kind(info: tarfile.TarInfo) -> Kind:
    if info.issparse() or any(key.startswith("GNU.sparse.") for key in info.pax_headers):
        return Kind.SPARSE
    if info.isdir():
        return Kind.DIRECTORY
    if info.islnk() or info.issym():
        return Kind.LINK
    return Kind.REGULAR if info.isreg() else Kind.OTHER


def _next_archive(read_at: ReadAt, end: int) -> int | None:
    """Return the offset of the next concatenated archive; None if there is none."""
    # `tarfile` takes a damaged header for the marker, so this function checks that the bytes at `end` are the marker.
    marker = read_at(tarfile.BLOCKSIZE, end)
    if len(marker) < tarfile.BLOCKSIZE:
        raise ArchiveDamage(
            reason="truncated-archive", detail=f"the file ends at byte {end + len(marker)} without an end marker"
        )
    if marker != _ZEROS:
        raise ArchiveDamage(reason="damaged-archive", detail=f"the header at byte {end} is invalid")
    following = read_at(tarfile.RECORDSIZE, end + tarfile.BLOCKSIZE)
    zeros = len(following) - len(following.lstrip(b"\0"))
    return None if zeros == len(following) else end + tarfile.BLOCKSIZE * (1 + zeros // tarfile.BLOCKSIZE)
