"""Makes thumbnails of the photos in an index, and of key frames of its clips.

A photo is shown only if its hash equals the hash in the index. Without this check, an
index from an untrusted author could show any file of the reader's machine.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from edje_index.images.clips import is_clip, key_frame
from edje_index.images.decode import ImageError, content_hash, decode_partial
from edje_index.images.transient import TransientInputError
from edje_index.inputs.containers import (
    ARCHIVES,
    PARQUET,
    Container,
    container_kind,
    split_uri,
)
from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import InputRef, display_path, read_bytes
from storage_formats.atomic import Json
from storage_formats.extras import MissingExtraError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_index_rows
from storage_formats.remote.urls import IndexLocation

MAX_PHOTO_BYTES = 1 << 26
"""Largest number of bytes of a photo file. A larger photo gets no thumbnail, to bound
time and memory.
"""

DEFAULT_SIDE = 256
"""Pixels of the longer side of a thumbnail."""

PHOTO_COLUMNS = ["uri", "uri_raw", "size", "content_hash", "status", "reason", "detail"]
"""The columns of the rows table that `read_photo` and `read_thumbnails` need."""

PHOTO_ERRORS = (
    ImageError,
    MissingExtraError,
    TransientInputError,
    OSError,
    MemoryError,
)
"""Exceptions that reading and decoding the photo of a row can raise.
`describe_photo_error` converts them to text.
"""

_JPEG_QUALITY = 82
# Largest number of members of an archive that are listed. The limit bounds the memory
# for their names.
_MAX_MEMBERS = 1_000_000


@dataclass(frozen=True)
class Thumbnail:
    """A small JPEG of a photo, or the reason why there is none.

    Attributes:
        jpeg: content of a JPEG file; None if the photo cannot be shown.
        problem: the reason why the photo cannot be shown; empty if it can be shown.
    """

    row_id: int
    uri: str
    jpeg: bytes | None
    problem: str = ""

    @property
    def data_uri(self) -> str | None:
        """The JPEG as a `data:` URI, which a web page can embed; None if `jpeg` is
        None.
        """
        return (
            None
            if self.jpeg is None
            else "data:image/jpeg;base64," + base64.b64encode(self.jpeg).decode()
        )


def read_thumbnails(
    index: IndexLocation | CommittedIndex,
    row_ids: Sequence[int],
    side: int = DEFAULT_SIDE,
) -> list[Thumbnail]:
    """Return one thumbnail per row id, in the order of `row_ids`. If a photo cannot be
    read, its thumbnail has a `problem` and no JPEG.

    Args:
        row_ids: rows of the index; duplicates are allowed.
        side: length of the longer side of a thumbnail in pixels.

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for
            `storage_formats.format.rows.read_rows`.
    """
    opened = index if isinstance(index, CommittedIndex) else CommittedIndex.open(index)
    rows = read_index_rows(opened, row_ids, PHOTO_COLUMNS).to_pylist()
    return [
        thumbnail_of(row_id, row, side)
        for row_id, row in zip(row_ids, rows, strict=True)
    ]


def thumbnail_of(row_id: int, row: Json, side: int) -> Thumbnail:
    """Return the thumbnail of a row with the columns `PHOTO_COLUMNS`. See
    `read_thumbnails`.
    """
    jpeg = None
    problem = ""
    try:
        data = read_photo(row)
        out = io.BytesIO()
        image = key_frame(data) if is_clip(data) else decode_partial(data)[0]
        image.thumbnail((side, side))
        image.save(out, "JPEG", quality=_JPEG_QUALITY)
        jpeg = out.getvalue()
    except PHOTO_ERRORS as error:
        problem = describe_photo_error(error)
    return Thumbnail(row_id, row["uri"], jpeg, problem)


def read_photo(row: Json) -> bytes:
    """Read the photo of a row and check its hash.

    Raises:
        ImageError: the row is not indexed, or its photo cannot be read, has no hash in
            the index, or has changed since it was indexed. For a row that is not
            indexed, `ImageError.reason` is the status of the row.
        TransientInputError, OSError, MemoryError: the photo cannot be read for a reason
            that may be temporary.
    """
    if row["status"] != INDEXED:
        raise ImageError(row["status"], row["reason"] or "see the rows table")
    if row["content_hash"] is None or row["size"] is None:
        raise ImageError(
            "unreadable",
            ("the index contains no hash of the photo, so the photo cannot be checked"),
        )
    if row["size"] > MAX_PHOTO_BYTES:
        raise ImageError(
            "too-many-bytes",
            f"{row['size']:,} bytes is over the limit of {MAX_PHOTO_BYTES:,}",
        )
    data = read_bytes(_locate(row))
    if content_hash(data) != row["content_hash"]:
        raise ImageError(
            "changed-since-plan",
            "the photo has changed since it was indexed",
        )
    return data


def describe_photo_error(error: Exception) -> str:
    """Return the reason why a photo cannot be shown. `error` is one of
    `PHOTO_ERRORS`.
    """
    if isinstance(error, MemoryError):
        return "too-expensive: there is too little memory to decode the photo"
    if isinstance(error, ImageError | MissingExtraError):
        return str(error)
    return "unreadable: the storage of the photo does not respond"


def _locate(row: Json) -> InputRef:
    """Return where the photo of a row is now: a file, or a part of an archive or
    Parquet file.
    """
    uri = row["uri"]
    size = row["size"]
    path = row["uri_raw"] or os.fsencode(uri)
    parts = split_uri(uri)
    # The uri of an archive member looks like the path of a file with a "!" in its name.
    # If such a file exists, it is the photo.
    if parts is not None and not os.path.isfile(path):
        path = row["uri_raw"] or os.fsencode(parts[0])
    if not os.path.isabs(path):
        raise ImageError(
            "not-a-local-path",
            "only photos with an absolute path on this machine are shown",
        )
    # This is checked here, because `read_bytes` tries again for some seconds if the
    # directory of the file is missing.
    if not os.path.isfile(path):
        raise ImageError("missing", "no such file")
    if parts is None or path == os.fsencode(uri):
        return InputRef(uri, path, size=size)
    archive, member = parts
    kind = str(container_kind(archive))
    status = os.stat(path)
    column = ""
    damage = None
    if kind == PARQUET:
        column, _, number = member.rpartition("/")
        offset = int(number) if number.isdecimal() else None
    else:
        offsets, damage = _member_offsets(
            path, kind, status.st_mtime_ns, status.st_size
        )
        offset = offsets.get((member, size))
    if offset is None:
        raise damage or ImageError("missing", f"the file has no such member: {member}")
    return InputRef(uri, path, Container(kind, status.st_size, column), offset, size)


@functools.lru_cache(maxsize=4)
def _member_offsets(
    path: bytes,
    kind: str,
    _modified: int,
    _size: int,
) -> tuple[dict[tuple[str, int], int], ImageError | None]:
    """Return a dictionary from (name, size) of each member to its offset, and the error
    if the archive is damaged after these members.

    If several members have the same name and size, the first wins. `_modified` and
    `_size` only distinguish cache entries.
    """
    offsets: dict[tuple[str, int], int] = {}
    with open_ranged(path, only_headers=True) as file:
        archive = ARCHIVES[kind](file)
        if archive.is_compressed:
            detail = (
                "the photo is in a compressed archive; unpack the archive to see it"
            )
            raise ImageError("too-expensive", detail)
        try:
            for member in itertools.islice(archive.members(), _MAX_MEMBERS):
                name = display_path(member.name)
                offsets.setdefault((name, member.size), member.offset)
        except ImageError as error:
            return offsets, error
    return offsets, None
