"""Defines `InputRef`, which locates one input of a build. Reads the bytes of inputs."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edje_index.images.containers.container import Container, read_packed
from edje_index.images.decode import ImageError
from edje_index.images.ranges import read_range
from edje_index.images.remote.urls import (
    ChangedFileError,
    OversizedFileError,
    UnreachableError,
    is_remote,
    scheme_of,
)
from edje_index.images.transient import retry
from storage_formats.format.object_store import WEB_SCHEMES
from storage_formats.format.source_columns import Value, text_of

MAX_INPUT_BYTES = 1 << 30
"""Largest number of bytes of an input. Larger inputs are rejected, to bound the memory of a reader."""


@dataclass(frozen=True, slots=True)
class InputRef:
    """One input of a build.

    Attributes:
        uri: readable name in the rows table: an absolute path or URL, "<archive>!<member>" or
            "<Parquet file>!<column>/<row>". Bytes that are not UTF-8 are written as %XX.
        path: path or URL of the file that contains the input, as bytes (`os.fsencode`). Any file name works.
        offset: offset of the input's bytes in the file. For a compressed tar, the offset in the decompressed archive.
            For a zip, the offset of the member's header. For a Parquet file, the row, counted from 0.
        size: number of bytes of the input when the build was planned; None if unknown.
        member: True if the input is a part of the file, the bytes [offset, offset + size). False if the input is the
            whole file.
        content_hash: SHA-256 of the input, 64 hex digits; None if the plan did not hash the input.
        duplicate_of: row id of the first input with the same bytes; None if the input is not a duplicate.
        problem: reason why the input cannot be encoded, one of `edje_index.images.decode.REASONS`. None if planning
            found no problem.
        metadata: values of the source columns by name; None if the input has no such values.
        container: how the file packs the input; None if the input is a range of bytes or the whole file.
    """

    uri: str
    path: bytes
    offset: int = 0
    size: int | None = None
    member: bool = False
    content_hash: str | None = None
    duplicate_of: int | None = None
    problem: str | None = None
    metadata: Mapping[str, Value] | None = field(default=None, hash=False)
    container: Container | None = None

    @property
    def uri_raw(self) -> bytes | None:
        """The field `path`, if `path` is not UTF-8; otherwise None."""
        try:
            self.path.decode()
        except UnicodeDecodeError:
            return self.path
        return None


def rows_digest(refs: Iterable[InputRef]) -> str:
    """Return the SHA-256 of everything that determines the rows of `refs` except their metadata, in hexadecimal."""
    digest = hashlib.sha256()
    for ref in refs:
        where = (ref.uri, ref.path, ref.offset, ref.size, ref.member, ref.container and str(ref.container))
        digest.update(repr((*where, ref.content_hash, ref.duplicate_of, ref.problem)).encode() + b"\n")
    return digest.hexdigest()


def metadata_text(metadata: Mapping[str, Value]) -> str:
    """Return `metadata` as JSON with sorted keys. Timestamps are written in ISO 8601."""
    return json.dumps(metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=text_of)


def display_path(path: bytes) -> str:
    """Return `path` as text. Bytes that are not UTF-8 are written as %XX."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        text = path.decode("utf-8", "surrogateescape")
        return "".join(f"%{ord(c) - 0xDC00:02X}" if "\udc80" <= c <= "\udcff" else c for c in text)


def read_bytes(ref: InputRef) -> bytes:
    """Read all bytes of an input. Temporary storage errors are retried for some seconds.

    Raises:
        TransientInputError: a temporary storage error persists.
        ImageError: the input cannot be read. The reason is `ref.problem`, if planning found a problem. Otherwise it is
            for example "missing", "empty" or "changed-since-plan".
    """
    if ref.problem is not None:
        raise ImageError(reason=ref.problem, detail="found while planning")
    try:
        data = retry(lambda: _open_and_read(ref), ref.uri, MAX_INPUT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageError(reason="missing", detail=f"{error.strerror}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ImageError(reason="unreadable", detail=getattr(error, "strerror", None) or str(error)) from error
    if not data:
        raise ImageError(reason="empty", detail="0 bytes")
    return data


def _open_and_read(ref: InputRef) -> bytes:
    if ref.container is None and (ref.size or 0) > MAX_INPUT_BYTES:
        raise ImageError(reason="too-many-bytes", detail=f"{ref.size} bytes is over the limit of {MAX_INPUT_BYTES}")
    if is_remote(ref.path):
        return _read_remote(ref)
    try:
        if ref.container is not None:
            return read_packed(ref.path, ref.container, ref.offset, size=ref.size, max_bytes=MAX_INPUT_BYTES)
        fd = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError as error:
        was_there = ref.size is not None or ref.container is not None
        if was_there and _directory_vanished(ref.path):
            raise OSError(errno.ESTALE, "the directory is gone or empty") from error
        raise
    try:
        return _read(fd, ref)
    finally:
        os.close(fd)


def _read_remote(ref: InputRef) -> bytes:
    """Read an input at a URL.

    Raises:
        ImageError: the input cannot be read. A whole file on a web server that does not respond is "unreachable".
            A list can name many web servers, and some of them may no longer exist.
        UnreachableError: the server of any other input does not respond. The caller tries again.
        OSError: the server refuses the request.
    """
    from edje_index.images.remote.access import read_remote, read_remote_range

    url = os.fsdecode(ref.path)
    try:
        if ref.container is not None:
            return read_packed(ref.path, ref.container, ref.offset, size=ref.size, max_bytes=MAX_INPUT_BYTES)
        if ref.member:
            return read_remote_range(url, ref.size, ref.offset) if ref.size else b""
        data = read_remote(url, MAX_INPUT_BYTES)
    except OversizedFileError as error:
        raise ImageError(reason="too-many-bytes", detail=f"{error.strerror}") from error
    except (EOFError, ChangedFileError) as error:
        raise ImageError(reason="changed-since-plan", detail=str(error)) from error
    except UnreachableError as error:
        if ref.member or scheme_of(url) not in WEB_SCHEMES:
            raise
        raise ImageError(reason="unreachable", detail=f"{error.strerror}") from error
    if ref.size not in (None, len(data)):
        raise _changed(ref, len(data))
    return data


def _changed(ref: InputRef, size: int) -> ImageError:
    return ImageError("changed-since-plan", f"the size is {size} bytes, but was {ref.size} when the plan was made")


def _directory_vanished(path: bytes) -> bool:
    """Return True if the directory of `path` is missing or empty, for example after an unmount."""
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return next(entries, None) is None
    except NotADirectoryError:
        return False
    except OSError:
        return True


def _read(fd: int, ref: InputRef) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(reason="unreadable", detail="the input is not a regular file")
    size = max(0, min(ref.size or 0, status.st_size - ref.offset)) if ref.member else status.st_size
    if ref.size is not None and size != ref.size:
        raise _changed(ref, size)
    if size > MAX_INPUT_BYTES:
        raise ImageError(reason="too-many-bytes", detail=f"{size} bytes is over the limit of {MAX_INPUT_BYTES}")
    data = read_range(fd, size, ref.offset)
    if len(data) != size:
        if os.fstat(fd).st_size >= ref.offset + size:
            raise OSError(errno.EIO, f"a read ended {size - len(data)} bytes before the end of the file")
        raise ImageError(reason="changed-since-plan", detail=f"read only {len(data)} of {size} bytes")
    return data
