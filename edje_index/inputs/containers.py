"""Reads inputs that are packed in containers: archives and Parquet files.

`ARCHIVES` lists the kinds of archives. To add a kind, write a class like `ZipArchive`,
and add entries to `ARCHIVES` and `ARCHIVE_SUFFIXES`. If the class reads only headers to
list the members, add the suffix of the new kind to `TreeSource` in
`pipelines.sources.kinds`, too.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import functools
import itertools
import os
import re
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from edje_index.images.decode import ImageError
from edje_index.inputs.column_types import BYTES, column_kind
from edje_index.inputs.names import (
    MAX_SIDECAR_BYTES,
    SIDECAR_SUFFIXES,
    file_name,
    join_sidecars,
    sample_of,
)
from edje_index.inputs.ranges import RangedFile, StreamWindow, Turns, open_ranged
from edje_index.inputs.tars import Member, TarArchive, check_bytes
from storage_formats.format.parquet import iter_batches, open_parquet
from storage_formats.remote.urls import is_url

PARQUET = "parquet"

MAX_EXPANSION = 100
FREE_EXPANSION = 16 << 20
"""A member of a zip may expand to at most `FREE_EXPANSION` bytes + `MAX_EXPANSION`
times its compressed size, and a row group of a Parquet file with images to at most
`FREE_EXPANSION` bytes + `MAX_EXPANSION` times the size of the file.
"""

# The compression methods that are read. For other methods, `zipfile` does not limit the
# output of one step, so that 1 MiB could expand to gigabytes at once.
_ZIP_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
# flags of a member of a zip
_ENCRYPTED = 0x1
_UTF8 = 0x800
# The header of a member or of its entry in the list of members, up to the high byte of
# the flags, which has the UTF-8 flag.
_FLAGS = re.compile(rb"(PK(?:\x01\x02..|\x03\x04)...)(.)", re.DOTALL)
# Number of bytes of a column that PyArrow reads at once. Without this setting, PyArrow
# reads the whole column of a row group.
_PARQUET_BUFFER = 1 << 20
# exceptions that the parsers raise on damaged files
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    OverflowError,
    pa.ArrowException,
)
# Number of containers that a process keeps open. `_opened` has them by their keys, the
# latest used last.
_MAX_OPEN = 8
_opened: dict[Any, Archive | ParquetImages] = {}
# At the exit, the files are closed while all modules still exist.
atexit.register(_opened.clear)
# held to open a container, so that two threads do not open the same one
_OPENING = threading.Lock()


class ZipArchive:
    """An open zip. Thread-safe. The offset of a member is the offset of its header.

    It has the methods of a `TarArchive`.

    Raises:
        ImageError: the list of members is damaged.
    """

    is_compressed = False

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        with _named_damage("the list of members of the zip"):
            try:
                self._archive = zipfile.ZipFile(file)
            except UnicodeDecodeError:
                # A name has the UTF-8 flag, but is not UTF-8.
                self._archive = zipfile.ZipFile(RangedFile(self._plain, file.length))
        self._info_at = {info.header_offset: info for info in self._archive.infolist()}

    def _plain(self, size: int, offset: int) -> bytes:
        """Return bytes of the file. The entries in the list of members have no UTF-8
        flag, so that `zipfile` decodes any name, as code page 437.
        """
        data = self._file.pread(size, offset)
        return _FLAGS.sub(lambda entry: entry[1] + bytes([entry[2][0] & ~8]), data)

    def members(self) -> Iterator[Member]:
        """Yield the files in the order of the archive's list of members. No content
        is read.
        """
        for info in self._archive.infolist():
            # The name of a directory ends with a slash. `ZipInfo.is_dir` is not used,
            # because it fails for an empty name.
            if not info.filename.endswith("/"):
                name = info.filename.encode("utf-8", "backslashreplace")
                # macOS and other systems write names in UTF-8, but do not set the UTF-8
                # flag. `zipfile` decodes such a name as code page 437.
                if not info.flag_bits & _UTF8:
                    with contextlib.suppress(UnicodeError):
                        name = info.filename.encode("cp437").decode().encode()
                yield Member(
                    name,
                    info.header_offset,
                    info.file_size,
                    _zip_problem(info),
                )

    def read(self, offset: int, size: int) -> bytes:
        info = self._member(offset)
        if info.file_size != size:
            raise ImageError(
                "changed-since-plan",
                f"the size is {info.file_size} bytes, but was {size}",
            )
        return self.head(offset, size)

    def head(self, offset: int, size: int) -> bytes:
        info = self._member(offset)
        with _named_damage("the member of the zip"), self._archive.open(info) as member:
            # For an empty member, 1 byte is requested, because a read of 0 bytes would
            # not compare the checksum.
            return member.read(size or 1)

    def _member(self, offset: int) -> zipfile.ZipInfo:
        info = self._info_at.get(offset)
        if info is None:
            raise ImageError(
                "changed-since-plan",
                f"the archive has no member at byte {offset}",
            )
        if (problem := _zip_problem(info)) is not None:
            raise ImageError(problem, "found while planning")
        return info


def _zip_problem(info: zipfile.ZipInfo) -> str | None:
    """Return the reason why a member cannot be read; None if it can be read."""
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    if is_link or info.flag_bits & _ENCRYPTED or info.compress_type not in _ZIP_METHODS:
        return "unsupported-member"
    if info.file_size > FREE_EXPANSION + MAX_EXPANSION * info.compress_size:
        return "too-expensive"
    return None


@contextlib.contextmanager
def _named_damage(part: str) -> Iterator[None]:
    """Convert the exceptions that a parser raises on a damaged file to ImageError. The
    detail names the damaged `part`. Errors of the operating system stay unchanged.
    """
    try:
        yield
    except _DAMAGE as error:
        # If the operating system fails to read the end of a zip, `zipfile` raises
        # BadZipFile, with the error of the operating system as its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None
        # Arrow's exception for too little memory is both an ArrowException and a
        # MemoryError. The file is not damaged.
        if isinstance(error, MemoryError):
            raise
        detail = f"{part} is damaged: {error or type(error).__name__}"
        raise ImageError("damaged-archive", detail) from error


class ParquetImages:
    """The images in one column of an open Parquet file. `image_leaf` says which columns
    can hold images. The offset of an image is its row, counted from 0.

    Raises:
        ImageError: the file is damaged, or has no images in a column of this name.
    """

    def __init__(self, file: RangedFile, column: str) -> None:
        self._file = file
        with _named_damage("the Parquet file"):
            self._parquet = open_parquet(file, buffer_size=_PARQUET_BUFFER)
            leaf = image_leaf(self._parquet.schema_arrow, column)
            check_expansion(self._parquet, file.length)
        if leaf is None:
            raise ImageError(
                "changed-since-plan",
                f"the file has no images in a column {column}",
            )
        self._leaf = leaf
        metadata = self._parquet.metadata
        sizes = (
            metadata.row_group(group).num_rows
            for group in range(metadata.num_row_groups)
        )
        *self._group_starts, self._rows = itertools.accumulate(sizes, initial=0)
        # A row group can only be read forward. Threads that read rows in order may be
        # in two groups. The file is read by one thread at a time.
        self._windows: dict[int, StreamWindow] = {}
        self._turns = Turns()

    def read(self, offset: int, size: int) -> bytes:
        if offset >= self._rows:
            raise ImageError("changed-since-plan", f"the file has no row {offset}")
        group = bisect.bisect_right(self._group_starts, offset) - 1
        row = offset - self._group_starts[group]
        with self._turns.at(offset):
            # The window does not refer to this object. Otherwise, only the garbage
            # collector would close the file of an object that nobody uses any more.
            window = self._windows.pop(group, None) or StreamWindow(
                functools.partial(_images, self._parquet, self._leaf, group)
            )
            self._windows[group] = window
            if len(self._windows) > 2:
                del self._windows[next(iter(self._windows))]
            items = window.read(row, row + 1)
        if not items or items[0].data is None:
            raise ImageError("changed-since-plan", f"the file has no image {offset}")
        return items[0].data


def _images(parquet: Any, leaf: str, group: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (1, bytes of the image) for each row of row group `group`."""
    # A batch has one row, to bound memory. A Parquet file stores a repeated value once,
    # so a batch of many rows could be much larger than the file.
    with _named_damage("the Parquet file"):
        for batch in iter_batches(parquet, 1, [leaf], [group]):
            value = batch.column(0)[0].as_py()
            yield 1, value["bytes"] if isinstance(value, dict) else value


Archive: TypeAlias = TarArchive | ZipArchive


def image_leaf(schema: Any, column: str) -> str | None:
    """Return the path of the Parquet column with the bytes of images; None if `column`
    cannot hold images.

    The bytes are in a binary column, or in the binary field `bytes` of a struct column,
    as Hugging Face Datasets writes images.
    """
    if len(schema.get_all_field_indices(column)) != 1:
        return None
    arrow_type = schema.field(column).type
    leaf = column
    if pa.types.is_struct(arrow_type) and arrow_type.get_field_index("bytes") >= 0:
        arrow_type = arrow_type.field("bytes").type
        leaf = f"{column}.bytes"
    return leaf if column_kind(arrow_type) == BYTES else None


def check_expansion(parquet: Any, length: int) -> None:
    """Raise ValueError if a row group of an open Parquet file of `length` bytes has
    columns of images, and expands to much more than the file.
    """
    schema = parquet.schema_arrow
    if not any(image_leaf(schema, name) for name in schema.names):
        return
    # The metadata of a single column is not used: if it is damaged, PyArrow (26.0)
    # aborts the process.
    for group in range(parquet.metadata.num_row_groups):
        size = parquet.metadata.row_group(group).total_byte_size
        if size > FREE_EXPANSION + MAX_EXPANSION * length:
            raise ValueError(
                f"row group {group} has {size} bytes, but the file has only {length}"
            )


ARCHIVES: dict[str, Callable[[RangedFile], Archive]] = {
    "tar": TarArchive,
    "zip": ZipArchive,
}
"""Kind of an archive -> function that opens it, or raises ImageError if the archive is
damaged.
"""

ARCHIVE_SUFFIXES = {
    ".tar": "tar",
    ".tar.gz": "tar",
    ".tgz": "tar",
    ".tar.bz2": "tar",
    ".tbz2": "tar",
    ".tar.xz": "tar",
    ".txz": "tar",
    ".tar.zst": "tar",
    ".tzst": "tar",
    ".zip": "zip",
}
"""Suffix of an archive -> kind."""

_SUFFIXES = {**ARCHIVE_SUFFIXES, ".parquet": PARQUET}
# the suffix of a container in front of the "!" of a uri, see `split_uri`
_MEMBER_MARK = re.compile(
    f"(?:{'|'.join(map(re.escape, _SUFFIXES))})(?=!)", re.IGNORECASE
)


def members_with_sidecars(
    archive: Archive, clips: bool
) -> Iterator[tuple[Member, dict[str, bytes | None]]]:
    """Yield the members of an archive in order, each with the contents of its metadata
    files by suffix. The content is None for a metadata file that cannot be used.

    `join_sidecars` defines which metadata files belong to a member. These files are not
    yielded as members. All members are listed before the first is yielded, because the
    metadata files may come after all images.

    Concatenated archives can contain the same names several times. Of several metadata
    files with the same name, a member gets the one in its sample, or else the first. As
    in WebDataset, a sample consists of consecutive members whose paths agree up to the
    first dot of the file name.

    Raises:
        ImageError: the archive is damaged. The members before the damage are yielded
            first.
    """
    members: list[tuple[int, Member]] = []
    # (number of a sample, name of a metadata file in it) -> content
    contents: dict[tuple[int, bytes], bytes | None] = {}
    damage = None
    number = 0
    key = b""
    names: set[bytes] = set()
    try:
        for member in archive.members():
            name = member.name
            if name in names or sample_of(name) != key:
                # Contents that may not be needed are dropped, to bound memory.
                _, used = join_sidecars(names, clips)
                for unused in names - used:
                    contents.pop((number, unused), None)
                number += 1
                key = sample_of(name)
                names = set()
            names.add(name)
            members.append((number, member))
            # Metadata files are read as they pass, because a compressed archive would
            # be decompressed again for them.
            if os.fsdecode(name).lower().endswith(SIDECAR_SUFFIXES):
                contents[number, name] = _sidecar(archive, member)
    except ImageError as error:
        damage = error
    joined, used = join_sidecars([member.name for _, member in members], clips)
    first: dict[bytes, bytes | None] = {}
    for number, member in members:
        name = member.name
        if name in used:
            if (number, name) not in contents:
                contents[number, name] = _sidecar(archive, member)
            first.setdefault(name, contents[number, name])
    for number, member in members:
        if member.name not in used:
            yield (
                member,
                {
                    suffix: contents.get((number, name), first[name])
                    for suffix, name in joined.get(member.name, {}).items()
                },
            )
    if damage is not None:
        raise damage


def _sidecar(archive: Archive, member: Member) -> bytes | None:
    """Return the content of a metadata file; None if it cannot be used."""
    if member.problem is None and member.size <= MAX_SIDECAR_BYTES:
        with contextlib.suppress(ImageError):
            return archive.read(member.offset, member.size)
    return None


class Container(NamedTuple):
    """How a file packs an input.

    Attributes:
        kind: a key of `ARCHIVES`, or "parquet".
        length: number of bytes of the file when the plan was made.
        column: name of the column with the images in a Parquet file; empty for an
            archive.
    """

    kind: str
    length: int
    column: str = ""


def container_kind(name: str) -> str | None:
    """Return the kind of a container by the suffix of its path or URL; None if no kind
    has this suffix.
    """
    name = file_name(name).lower()
    kinds = (kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix))
    return next(kinds, None)


def split_uri(uri: str) -> tuple[str, str] | None:
    """Split the uri "<archive or Parquet file>!<name>" at the "!". Return (path of the
    file, name), or None for any other uri.
    """
    mark = _MEMBER_MARK.search(uri)
    return None if mark is None else (uri[: mark.end()], uri[mark.end() + 1 :])


def read_packed(
    path: bytes,
    container: Container,
    offset: int,
    *,
    size: int | None,
    max_bytes: int,
) -> bytes:
    """Return the bytes of an input in a container. Each process keeps a few containers
    open.

    Args:
        offset: position of the input, as in `InputRef`.
        size: number of bytes of the input; None if unknown.
        max_bytes: largest allowed number of bytes of the input.

    Raises:
        ImageError: the container has changed or is damaged, or the input is too large.
    """
    modified = None if is_url(path) else os.stat(path).st_mtime_ns
    # The process id is part of the key, because a forked process does not have the
    # threads that read a file on a server for its parent.
    key = path, container, modified, os.getpid()
    with _OPENING:
        _opened[key] = opened = _opened.pop(key, None) or _open(path, container)
        if len(_opened) > _MAX_OPEN:
            del _opened[next(iter(_opened))]
    check_bytes(size or 0, max_bytes)
    try:
        data = opened.read(offset, size or 0)
    except OSError:
        # After an error, a connection may be broken. The next call opens the container
        # again.
        with _OPENING:
            _opened.pop(key, None)
        raise
    if size is not None and len(data) != size:
        raise ImageError(
            "truncated-archive",
            f"the archive has only {len(data)} of {size} bytes",
        )
    check_bytes(len(data), max_bytes)
    return data


def _open(path: bytes, container: Container) -> Archive | ParquetImages:
    file = open_ranged(path)
    if file.length != container.length:
        raise ImageError("changed-since-plan", f"the file has {file.length} bytes now")
    if container.kind == PARQUET:
        return ParquetImages(file, container.column)
    return ARCHIVES[container.kind](file)
