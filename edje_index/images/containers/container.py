"""The kinds of files that pack inputs: archives and Parquet files.

`KINDS` is the only list of them. A new kind of archive is a class like `ZipArchive` and an entry of `KINDS`.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edje_index.images.containers.members import Archive, OpenContainer
from edje_index.images.containers.parquet_images import ParquetImages
from edje_index.images.containers.tars import TarArchive
from edje_index.images.containers.zips import ZipArchive
from edje_index.images.decode import ImageError
from edje_index.images.ranges import RangedFile, open_ranged
from edje_index.images.remote.urls import is_remote


@dataclass(frozen=True)
class ArchiveKind:
    """A kind of archive.

    Attributes:
        open: function that opens an archive. It raises ImageError if the archive is damaged.
        magic: the first bytes of the file.
        suffixes: suffixes of file names, if the first bytes are those of no kind. The compressed tars have none,
            because they share the suffixes of tars.
    """

    open: Callable[[RangedFile], Archive]
    magic: bytes | None = None
    suffixes: tuple[str, ...] = ()


TAR = "tar"
KINDS = {
    TAR: ArchiveKind(
        TarArchive,
        suffixes=(".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst"),
    ),
    "gzip": ArchiveKind(functools.partial(TarArchive, compression="gzip"), b"\x1f\x8b"),
    "bzip2": ArchiveKind(functools.partial(TarArchive, compression="bzip2"), b"BZh"),
    "xz": ArchiveKind(functools.partial(TarArchive, compression="xz"), b"\xfd7zXZ"),
    "zstd": ArchiveKind(functools.partial(TarArchive, compression="zstd"), b"\x28\xb5\x2f\xfd"),
    "zip": ArchiveKind(ZipArchive, b"PK\x03\x04", (".zip",)),
}
"""The kinds of archives by name."""

ARCHIVE_SUFFIXES = tuple(suffix for kind in KINDS.values() for suffix in kind.suffixes)
PARQUET, PARQUET_SUFFIX, PARQUET_MAGIC = "parquet", ".parquet", b"PAR1"

_MEMBER_MARK = re.compile(f"(?:{'|'.join(map(re.escape, (*ARCHIVE_SUFFIXES, PARQUET_SUFFIX)))})(?=!)", re.IGNORECASE)
_MAX_OPEN = 8
_OPENING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Container:
    """How a file packs an input.

    Attributes:
        kind: a key of `KINDS`, or "parquet".
        length: number of bytes of the file when the plan was made.
        column: name of the column of a Parquet file that holds the images.
    """

    kind: str
    length: int
    column: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.length} {self.column}"

    @classmethod
    def parse(cls, text: str) -> Container:
        """Convert the text that `str(container)` returned back to the container.

        Raises:
            ValueError: `text` describes no container.
        """
        kind, length, column = text.split(" ", 2)
        return cls(kind, int(length), column)


def magic_kind(head: bytes) -> str | None:
    """Return the kind of an archive that begins with `head`; None for an uncompressed tar and for other files."""
    return next((name for name, kind in KINDS.items() if kind.magic and head.startswith(kind.magic)), None)


def archive_kind(name: str, head: bytes) -> str | None:
    """Return the kind of an archive; None if a file of this name is no archive.

    Args:
        name: path of the file.
        head: the first bytes of the file.
    """
    name = name.lower()
    of_suffix = next((kind for kind, each in KINDS.items() if name.endswith(each.suffixes)), None)
    return of_suffix and (magic_kind(head) or of_suffix)


def split_uri(uri: str) -> tuple[str, str] | None:
    """Split the uri "<archive or Parquet file>!<name>" at the "!". Return None for any other uri."""
    mark = _MEMBER_MARK.search(uri)
    return None if mark is None else (uri[: mark.end()], uri[mark.end() + 1 :])


def read_packed(path: bytes, container: Container, offset: int, *, size: int | None, max_bytes: int) -> bytes:
    """Return the bytes of an input in a container. Each process keeps a few containers open.

    Args:
        path: path or URL of the container.
        container: how the file packs its inputs.
        offset: position of the input, see `InputRef`.
        size: number of bytes of the input when the plan was made; None if unknown.
        max_bytes: largest number of bytes of an input.

    Raises:
        ImageError: the container has changed or is damaged, or the input is too large.
        OSError: the container cannot be read.
    """
    try:
        modified = None if is_remote(path) else os.stat(path).st_mtime_ns
        with _OPENING:
            opened = _open(path, container, modified, os.getpid())  # a forked process lacks the threads of its parent
        data = opened.read(offset, size or 0, max_bytes)
    except OSError:
        _open.cache_clear()  # a broken connection must not stay
        raise
    if size is not None and len(data) != size:
        raise ImageError(reason="truncated-archive", detail=f"the archive has only {len(data)} of {size} bytes")
    return data


@functools.lru_cache(_MAX_OPEN)
def _open(path: bytes, container: Container, _modified: int | None, _process: int) -> OpenContainer:
    file = open_ranged(path)
    if file.length != container.length:
        raise ImageError(reason="changed-since-plan", detail=f"the file has {file.length} bytes now")
    if container.kind == PARQUET:
        return ParquetImages(file, container.column)
    return KINDS[container.kind].open(file)
