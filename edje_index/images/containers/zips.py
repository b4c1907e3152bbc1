"""Lists and reads the members of zip archives."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.ranges import RangedFile

MAX_EXPANSION = 100
FREE_EXPANSION = 16 << 20
"""A member may expand to at most `FREE_EXPANSION` bytes + `MAX_EXPANSION` times its compressed size."""

# zipfile limits the output of a single step for these methods only. Others expand 1 MiB to gigabytes at once.
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED = 0x1
_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One file in a zip.

    Attributes:
        name: name in the archive.
        offset: offset of the member's header in the archive.
        size: declared number of bytes of the content.
        problem: reason why the member cannot be read; None if it can be read.
    """

    name: str
    offset: int
    size: int
    problem: str | None = None


class ZipArchive:
    """An open zip. Thread-safe.

    Args:
        file: the archive. `close` closes this file.

    Raises:
        ArchiveDamage: the list of members is damaged.
        OSError: the file cannot be read.
    """

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        with _named_damage("the list of members"):
            self._archive = zipfile.ZipFile(file)
        self._info_at = {info.header_offset: info for info in self._archive.infolist()}

    def members(self) -> Iterator[ZipMember]:
        """Yield the files in the order of the archive's list of members. No content is read."""
        for info in self._archive.infolist():
            if not info.filename.endswith("/"):  # `ZipInfo.is_dir` fails for an empty name
                yield ZipMember(info.filename, info.header_offset, info.file_size, _problem(info))

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Return the content of the member whose header is at `offset`.

        Raises:
            ArchiveDamage: there is no such member, or it is damaged or larger than `max_bytes`.
            OSError: the file cannot be read.
        """
        info = self._info_at.get(offset)
        if info is None:
            raise ArchiveDamage(reason="changed-since-plan", detail=f"the archive has no member at byte {offset}")
        if (problem := _problem(info)) is not None:
            raise ArchiveDamage(reason=problem, detail="found while planning")
        if info.file_size > max_bytes:
            raise ArchiveDamage(
                reason="too-many-bytes", detail=f"{info.file_size} bytes is over the limit of {max_bytes}"
            )
        with _named_damage("the member"), self._archive.open(info) as member:
            return b"".join(iter(lambda: member.read(_STEP), b""))

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()
        self._file.close()


def _problem(info: zipfile.ZipInfo) -> str | None:
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    if is_link or info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
        return "unsupported-member"
    if info.file_size > FREE_EXPANSION + MAX_EXPANSION * info.compress_size:
        return "too-expensive"
    return None


@contextmanager
def _named_damage(part: str) -> Iterator[None]:
    """Turn errors of `zipfile` at damaged archives into ArchiveDamage. Operating system errors stay unchanged."""
    try:
        yield
    except (
        *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
        *(ValueError, RuntimeError, LookupError, OverflowError),
    ) as error:
        # `zipfile` replaces an error of the operating system at the end of the file by BadZipFile.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None
        raise ArchiveDamage(
            reason="damaged-archive", detail=f"{part} of the zip is damaged: {error or type(error).__name__}"
        ) from error
