"""Makes thumbnails of the photos in an index, and of key frames of its clips.

A photo is shown only if its hash equals the hash in the index. Without this check, an index from an untrusted author
could show any file of the reader's machine.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edje_index.images.clips import is_clip, key_frame
from edje_index.images.decode import DEFAULT_MAX_PIXELS, ImageError, content_hash, decode_partial
from edje_index.images.inputs import read_bytes
from edje_index.images.locate import locate
from edje_index.images.transient import TransientInputError
from storage_formats.extras import MissingExtraError
from storage_formats.format.rows import INDEXED, read_rows

MAX_PHOTO_BYTES = 1 << 26
"""Largest number of bytes of a photo with a thumbnail. The limit bounds time and memory."""

DEFAULT_SIDE = 256
"""Pixels of the longer side of a thumbnail."""

_JPEG_QUALITY = 82
PHOTO_COLUMNS = ["uri", "uri_raw", "size", "content_hash", "status", "reason", "detail"]
"""The columns of the rows table that `read_photo` and `read_thumbnails` need."""

PHOTO_ERRORS = (ImageError, MissingExtraError, TransientInputError, OSError, MemoryError)
"""What reading and decoding the photo of a row may raise. See `describe_photo_error`."""


@dataclass(frozen=True)
class Thumbnail:
    """A small JPEG of a photo, or the reason why there is none.

    Attributes:
        row_id: row id of the photo.
        uri: name of the photo in the rows table.
        jpeg: content of a JPEG file; None if the photo cannot be shown.
        problem: reason why the photo cannot be shown; empty if the photo can be shown.
    """

    row_id: int
    uri: str
    jpeg: bytes | None
    problem: str = ""

    @property
    def data_uri(self) -> str | None:
        """The JPEG as a `data:` URI, which a web page can embed; None without a JPEG."""
        return None if self.jpeg is None else "data:image/jpeg;base64," + base64.b64encode(self.jpeg).decode()


def read_thumbnails(root: str | Path, row_ids: Sequence[int], side: int = DEFAULT_SIDE) -> list[Thumbnail]:
    """Return one thumbnail per row id, in the order of `row_ids`. A photo that cannot be read raises no error.

    Args:
        root: directory of the index.
        row_ids: rows of the index; duplicates are allowed.
        side: length of the longer side of a thumbnail in pixels.

    Raises:
        RowIdError: a row id is out of range.
        UsageError, IncompleteIndexError, CorruptIndexError: as for `storage_formats.format.rows.read_rows`.
    """
    rows = read_rows(root, row_ids, PHOTO_COLUMNS).to_pylist()
    return [_thumbnail(row_id, row, side) for row_id, row in zip(row_ids, rows, strict=True)]


def read_photo(row: dict[str, Any]) -> bytes:
    """Read the photo of a row and check its hash.

    Args:
        row: one row of the rows table, by column name.

    Raises:
        ImageError: the photo cannot be read, has no hash in the index, or has changed since it was indexed.
        TransientInputError: a temporary storage error persists.
    """
    if row["content_hash"] is None or row["size"] is None:
        raise ImageError(
            reason="unreadable", detail="the index contains no hash of the photo, so the photo cannot be checked"
        )
    if row["size"] > MAX_PHOTO_BYTES:
        raise ImageError(
            reason="too-many-bytes", detail=f"{row['size']:,} bytes is over the limit of {MAX_PHOTO_BYTES:,}"
        )
    data = read_bytes(locate(row))
    if content_hash(data) != row["content_hash"]:
        raise ImageError(reason="changed-since-plan", detail="the photo has changed since it was indexed")
    return data


def _thumbnail(row_id: int, row: dict[str, Any], side: int) -> Thumbnail:
    if row["status"] != INDEXED:
        return Thumbnail(row_id, row["uri"], None, f"{row['status']}: {row['reason'] or 'see the rows table'}")
    try:
        return Thumbnail(row_id, row["uri"], _shrink(read_photo(row), side))
    except PHOTO_ERRORS as error:
        return Thumbnail(row_id, row["uri"], None, describe_photo_error(error))


def describe_photo_error(error: Exception) -> str:
    """Return the reason why a photo cannot be shown. `error` is one of `PHOTO_ERRORS`."""
    if isinstance(error, MemoryError):
        return "too-expensive: there is too little memory to decode the photo"
    if isinstance(error, ImageError | MissingExtraError):
        return str(error)
    return "unreadable: the storage of the photo does not respond"


def _shrink(data: bytes, side: int) -> bytes:
    image = key_frame(data, DEFAULT_MAX_PIXELS) if is_clip(data) else decode_partial(data, DEFAULT_MAX_PIXELS)[0]
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_JPEG_QUALITY)
    return out.getvalue()
