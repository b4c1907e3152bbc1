"""Lists and reads the members of zip archives."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from edje_index.images.containers.members import Member
from edje_index.images.decode import ImageError
from edje_index.images.ranges import RangedFile

MAX_EXPANSION = 100
FREE_EXPANSION = 16 << 20
"""A member may expand to at most `FREE_EXPANSION` bytes + `MAX_EXPANSION` times its compressed size."""

# zipfile limits the output of a single step for these methods only. Others expand 1 MiB to gigabytes at once.
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED = 0x1
_STEP = 1 << 20


class ZipArchive:
    """An open zip. Thread-safe. The offset of a member is that of its header.

    Args:
        file: the archive. `close` closes this file.

    Raises:
        ImageError: the list of members is damaged.
        OSError: the file cannot be read.
    """

    is_stream = False

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        with _named_damage("the list of members"):
            self._archive = zipfile.ZipFile(file)
        self._info_at = {info.header_offset: info for info in self._archive.infolist()}

    def members(self) -> Iterator[Member]:
        """Yield the files in the order of the archive's list of members. No content is read."""
        for info in self._archive.infolist():
            if not info.filename.endswith("/"):  # `ZipInfo.is_dir` fails for an empty name
                name = info.filename.encode("utf-8", "backslashreplace")
                yield Member(name, info.header_offset, info.file_size, _problem(info))

    def read(self, offset: int, size: int, max_bytes: int) -> bytes:
        """Return the content of the member whose header is at `offset`.

        Raises:
            ImageError: there is no such member, or it is damaged or larger than `max_bytes`.
            OSError: the file cannot be read.
        """
        info = self._info_at.get(offset)
        if info is None:
            raise ImageError(reason="changed-since-plan", detail=f"the archive has no member at byte {offset}")
        if (problem := _problem(info)) is not None:
            raise ImageError(reason=problem, detail="found while planning")
        if max(size, info.file_size) > max_bytes:
            detail = f"{max(size, info.file_size)} bytes is over the limit of {max_bytes}"
            raise ImageError(reason="too-many-bytes", detail=detail)
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
    """Turn errors of `zipfile` at damaged archives into ImageError. Operating system errors stay unchanged."""
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
        detail = f"{part} of the zip is damaged: {error or type(error).__name__}"
        raise ImageError(reason="damaged-archive", detail=detail) from error
