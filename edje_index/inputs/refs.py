"""Defines `InputRef`, the location of one input of a build, and reads the bytes of an
input.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edje_index.images.decode import ImageError
from edje_index.images.transient import retry
from edje_index.inputs.containers import Container, read_packed
from edje_index.inputs.ranges import open_file, read_range
from edje_index.inputs.tars import check_bytes
from storage_formats.format.source_columns import Value
from storage_formats.remote.files import ChangedFileError, UnreachableError, read_remote
from storage_formats.remote.urls import WEB_SCHEMES, is_url, scheme_of

MAX_INPUT_BYTES = 1 << 30
"""Largest number of bytes of an input. Larger inputs are rejected, to bound the
memory of a reader.
"""


@dataclass(frozen=True, slots=True)
class InputRef:
    """One input of a build: where its bytes are, and how to read them.

    Attributes:
        uri: readable name in the rows table: an absolute path or URL,
            "<archive>!<member>" or "<Parquet file>!<column>/<row>". Bytes that are not
            UTF-8 are written as %XX.
        path: path or URL of the file that contains the input, as bytes (`os.fsencode`).
            Any file name works.
        container: how the file packs the input; None if the input is the whole file.
        offset: position of the input in its container. In a Parquet file, it is the
            row, counted from 0. In an archive, the class of the archive defines what
            exactly it means, see `edje_index.inputs.containers`.
        size: number of bytes of the input when the build was planned; None if unknown.
        content_hash: SHA-256 of the input, 64 hex digits; None if the plan did not hash
            the input.
        duplicate_of: row id of the first input with the same bytes; None if the input
            is not a duplicate.
        problem: reason why the input cannot be encoded, one of
            `edje_index.images.decode.REASONS`. None if planning found no problem.
        metadata: values of the source columns by name; None if the input has no such
            values.
    """

    uri: str
    path: bytes
    container: Container | None = None
    offset: int = 0
    size: int | None = None
    content_hash: str | None = None
    duplicate_of: int | None = None
    problem: str | None = None
    metadata: Mapping[str, Value] | None = field(default=None, hash=False)

    @property
    def uri_raw(self) -> bytes | None:
        """The field `path`, if `path` is not UTF-8; otherwise None."""
        try:
            self.path.decode()
        except UnicodeDecodeError:
            return self.path
        return None

    @property
    def location(self) -> tuple[Any, ...]:
        """The first arguments with which `InputRef` makes an input of the same bytes.
        They are pickled in a tenth of the time of an `InputRef`.
        """
        return (
            self.uri,
            self.path,
            self.container,
            self.offset,
            self.size,
            self.content_hash,
        )


def display_path(path: bytes) -> str:
    """Return `path` as text. Bytes that are not UTF-8 are written as %XX."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        text = path.decode("utf-8", "surrogateescape")
        return "".join(
            f"%{ord(c) - 0xDC00:02X}" if "\udc80" <= c <= "\udcff" else c for c in text
        )


def read_bytes(ref: InputRef) -> bytes:
    """Read all bytes of an input. After a temporary error of the storage, the read is
    repeated for some seconds.

    Raises:
        ImageError: the input cannot be read. The reason is `ref.problem`, if planning
            found a problem. Otherwise it is for example "missing", "empty" or
            "changed-since-plan".
        TransientInputError: a temporary error of the storage persists.
    """
    if ref.problem is not None:
        raise ImageError(ref.problem, "found while planning")

    def read() -> bytes:
        try:
            if ref.container is not None:
                return read_packed(
                    ref.path,
                    ref.container,
                    ref.offset,
                    size=ref.size,
                    max_bytes=MAX_INPUT_BYTES,
                )
            if is_url(ref.path):
                return read_remote(os.fsdecode(ref.path), MAX_INPUT_BYTES)
            fd, length = open_file(ref.path)
            with open(fd, "rb", buffering=0):
                check_bytes(length, MAX_INPUT_BYTES)
                data = read_range(fd, length, 0)
            if len(data) != length:
                raise OSError(
                    errno.EIO,
                    f"a read ended {length - len(data)} bytes before the end of the"
                    " file",
                )
            return data
        except FileNotFoundError as error:
            # The size and the container are known only of files that existed when the
            # plan was made. If the directory of such a file is gone or empty, its file
            # system may not be mounted. ESTALE makes `retry` wait for it.
            if not is_url(ref.path) and (
                ref.size is not None or ref.container is not None
            ):
                try:
                    with os.scandir(os.path.dirname(ref.path)) as entries:
                        is_vanished = next(entries, None) is None
                except OSError as problem:
                    is_vanished = not isinstance(problem, NotADirectoryError)
                if is_vanished:
                    raise OSError(
                        errno.ESTALE, "the directory is gone or empty"
                    ) from error
            raise
        except UnreachableError as error:
            # A list can name many web servers, and some may not exist any more. If a
            # web server does not respond, the inputs on this server fail, and the other
            # inputs are read. In contrast, `retry` repeats a request to an object store
            # and a request for a part of a container.
            if (
                ref.container is not None
                or scheme_of(os.fsdecode(ref.path)) not in WEB_SCHEMES
            ):
                raise
            raise ImageError("unreachable", f"{error.strerror}") from error

    try:
        data = retry(read, ref.uri, MAX_INPUT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageError("missing", f"{error.strerror}") from error
    except (ChangedFileError, EOFError) as error:
        raise ImageError("changed-since-plan", str(error)) from error
    except (OSError, ValueError) as error:
        # A path with a NUL byte raises ValueError.
        is_too_large = getattr(error, "errno", None) == errno.EFBIG
        reason = "too-many-bytes" if is_too_large else "unreadable"
        raise ImageError(
            reason, getattr(error, "strerror", None) or str(error)
        ) from error
    if ref.size not in (None, len(data)):
        detail = (
            f"the size is {len(data)} bytes, but was {ref.size} when the plan was made"
        )
        raise ImageError("changed-since-plan", detail)
    if not data:
        raise ImageError("empty", "0 bytes")
    return data
