"""Limits on the cost of decoding one image. Without them, a small file could keep a decoder busy for minutes.

The limits count scans, reads and pixels, not seconds. A file therefore fails on every machine or on none.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer

MAX_SCANS = 100
"""Largest number of scans of a JPEG. Encoders write 1 to 18; libtiff has the same limit for the JPEGs inside a TIFF."""

MAX_FULL_SCANS = 20
"""Largest number of scans of a JPEG of the largest allowed size. Each scan visits every pixel, so a smaller JPEG may
have more scans."""

MAX_READS = 5_000_000
"""Largest number of reads by a decoder. Pillow reads headers, and whole images of a few formats, in small steps."""

MAX_PYTHON_PIXELS = 1 << 21
"""Largest number of pixels of an image that Pillow decodes in Python (QOI, plain-text PPM and others). Decoding takes
about a microsecond per pixel."""

MAX_PYTHON_BYTES = 1 << 25
"""Largest number of bytes of a file that Pillow decodes in Python."""

BYTES_PER_PIXEL = 12
"""Bytes of memory per pixel that are enough to decode any image. A progressive CMYK JPEG takes 8 for coefficients."""

_MAX_COMMENTS = 1000  # of a plain-text PPM; Pillow copies a megabyte for each
_MAX_SEGMENTS = 100_000  # of a JPEG
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # the markers of segments: TEM and RST0 to RST7 have no length
_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN = 0xD8, 0xD9, 0xDA


class TooExpensiveError(Exception):
    """Decoding an image would take too long. The message names the limit."""


class CountedReads(io.BytesIO):
    """A file in memory whose method `read` raises TooExpensiveError after `MAX_READS` calls."""

    def __init__(self, data: ReadableBuffer) -> None:
        super().__init__(data)
        self._reads_left = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise TooExpensiveError(f"decoding the image takes more than {MAX_READS} reads")
        return super().read(size)


def check_cost(image: Any, data: bytes, max_pixels: int) -> None:
    """Check the cost of decoding an opened image whose pixels are not decoded yet.

    Args:
        image: image that Pillow opened, a `PIL.ImageFile.ImageFile`.
        data: content of the image file.
        max_pixels: largest number of pixels that any image may have. It determines the limit on JPEG scans.

    Raises:
        TooExpensiveError: decoding the image would take too long.
    """
    pixels = image.width * image.height
    if image.format in ("JPEG", "MPO"):
        _check_scans(data, pixels, max_pixels)
    if any(tile[0] in Image.DECODERS for tile in image.tile):  # the registry of decoders written in Python
        _check_python_decoder(data, pixels)


def can_allocate(size: int) -> bool:
    """Return True if the process can allocate `size` more bytes of memory now."""
    try:
        np.empty(size, np.uint8)
    except MemoryError:
        return False
    return True


def _check_scans(jpeg: bytes, pixels: int, max_pixels: int) -> None:
    limit = min(MAX_SCANS, MAX_FULL_SCANS * max_pixels // max(1, pixels))
    for number, _ in enumerate(_scan_offsets(jpeg), start=1):
        if number > limit:
            raise TooExpensiveError(f"the JPEG of {pixels} pixels has more than {limit} scans")


def _scan_offsets(jpeg: bytes) -> Iterator[int]:
    """Yield the offset of each scan header of a JPEG. Scans of embedded thumbnails are skipped."""
    offset = 2
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(jpeg, offset)
        if marker is None or (kind := jpeg[marker.end() - 1]) in (_START_OF_IMAGE, _END_OF_IMAGE):
            return
        if kind == _START_OF_SCAN:
            yield marker.start()
        offset = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")
    raise TooExpensiveError(f"the JPEG has more than {_MAX_SEGMENTS} segments")


def _check_python_decoder(data: bytes, pixels: int) -> None:
    if pixels > MAX_PYTHON_PIXELS:
        raise TooExpensiveError(
            f"the image has {pixels} pixels, more than the limit of {MAX_PYTHON_PIXELS} for this format"
        )
    if len(data) > MAX_PYTHON_BYTES:
        raise TooExpensiveError(
            f"the image has {len(data)} bytes, more than the limit of {MAX_PYTHON_BYTES} for this format"
        )
    if data[:2] in (b"P1", b"P2", b"P3") and data.count(b"#") > _MAX_COMMENTS:
        raise TooExpensiveError(f"the plain-text PPM has more than {_MAX_COMMENTS} comments")
