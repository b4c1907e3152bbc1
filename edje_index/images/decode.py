"""Decodes image files to upright 8-bit RGB images.

The image is turned upright by its EXIF orientation. For an animation or a multi-page file, only the first frame is
decoded.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from PIL import ExifTags, Image, ImageFile

from edje_index.images.decode_limits import (
    BYTES_PER_PIXEL,
    CountedReads,
    TooExpensiveError,
    can_allocate,
    check_cost,
)
from edje_index.images.headers import HEAD_BYTES, canvas_size, image_format, undecoded_format
from edje_index.images.pillow_setup import ignore_warnings, loading_truncated, openers
from edje_index.images.to_rgb import to_rgb

REASONS = (
    "bad-list-line",
    "changed-since-plan",
    "corrupt",
    "damaged-archive",
    "empty",
    "extreme-aspect-ratio",
    "missing",
    "non-finite-output",
    "not-a-local-path",
    "not-an-image",
    "too-expensive",
    "too-many-bytes",
    "too-many-pixels",
    "truncated",
    "truncated-archive",
    "unreachable",
    "unreadable",
    "unsupported-image",
    "unsupported-member",
    "unsupported-video",
    "worker-died",
)
"""All reasons why an input can have no block. Each reason is a value of the column `reason` in the rows table."""

DEFAULT_MAX_PIXELS = 89_478_485
"""Default limit on the pixels of an image: the number above which Pillow suspects a decompression bomb."""

MAX_ASPECT_RATIO = 256
"""Largest ratio of the longer side to the shorter side, to bound the size of the resized image."""

TRUNCATED = "truncated"
"""The reason of a file that ends before its last pixel."""

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pattern in a decoder's message -> reason; anything else is "corrupt".
_REASONS_OF_MESSAGES = (
    ("truncat|unexpected end|EOF", TRUNCATED),
    ("unknown pixel mode|unsupported", "unsupported-image"),
)
_TIFF_TILE_SIZE = (322, 323)
_PNG_TEXT = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})
_MAX_PNG_CHUNKS = 1_000_000


class ImageError(Exception):
    """An input cannot be encoded. A build gives the row of the input the status "failed", with `reason` and `detail`.

    Attributes:
        reason: one of `REASONS`.
        detail: human-readable description.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def content_hash(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def decode_rgb(data: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Decode the first frame of an image file to an upright RGB image. Thread-safe.

    Args:
        data: content of the file.
        max_pixels: largest number of pixels. The number is checked before memory for the pixels is allocated.

    Raises:
        ImageError: the image cannot be decoded, or has too many pixels.
        MemoryError: there is too little memory.
    """
    if not data:
        raise ImageError(reason="empty", detail="0 bytes")
    ignore_warnings()
    name = image_format(data[:HEAD_BYTES])
    if name is None or name not in openers():
        raise _unsupported(data, name)
    try:
        return _decode_with_any_text(data, name, max_pixels)
    except (ImageError, MemoryError):
        raise
    except TooExpensiveError as error:
        raise ImageError(reason="too-expensive", detail=str(error)) from error
    except Exception as error:  # decoders raise any exception on damaged input
        raise _damaged(error, name) from error


def decode_partial(data: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[Image.Image, str | None]:
    """Do the same as `decode_rgb`, but load a truncated file as far as it goes. The missing pixels are grey or black.

    Returns:
        The image, and a description of the truncation; None for a complete file.

    Raises:
        ImageError, MemoryError: as in `decode_rgb`. A file that ends before its first pixel has the reason "truncated".
    """
    try:
        return decode_rgb(data, max_pixels), None
    except ImageError as error:
        if error.reason != TRUNCATED:
            raise
        problem = error
    with loading_truncated():
        try:
            return decode_rgb(data, max_pixels), str(problem)
        except ImageError:
            raise problem from None


def _decode_with_any_text(data: bytes, name: str, max_pixels: int) -> Image.Image:
    """Decode an image. If a PNG contains more text than Pillow accepts, decode the image without the text."""
    try:
        return _decode(data, name, max_pixels)
    except ValueError as error:
        if name != "PNG" or "MAX_TEXT" not in str(error):
            raise
        return _decode(_without_text(data), name, max_pixels)


def _decode(data: bytes, name: str, max_pixels: int) -> Image.Image:
    check_size(canvas_size(data, name) or (1, 1), max_pixels)
    image = openers()[name](CountedReads(data), "")
    check_size(image.size, max_pixels)
    if name == "TIFF":
        _check_tile(image, max_pixels)
    check_cost(image, data, max_pixels)
    _load(image)
    return _upright(image, _orientation(image))


def _load(image: Image.Image) -> None:
    """Decode the pixels. Raise MemoryError if memory is short."""
    # Without memory, some decoders report a damaged file.
    try:
        image.load()
    except Exception as error:
        if can_allocate(BYTES_PER_PIXEL * image.width * image.height):
            raise
        raise MemoryError(f"not enough memory to decode an image of {image.width} x {image.height} pixels") from error


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ImageError if (width, height) is over the limit of pixels, or extremely wide or high."""
    width, height = size
    if width * height > max_pixels:
        raise ImageError(
            reason="too-many-pixels", detail=f"{width} x {height} is over the limit of {max_pixels} pixels"
        )
    if max(size) > MAX_ASPECT_RATIO * max(1, min(size)):
        raise ImageError(
            reason="extreme-aspect-ratio", detail=f"{width} x {height} is over the limit of {MAX_ASPECT_RATIO} to 1"
        )


def _check_tile(image: Any, max_pixels: int) -> None:
    """Check the tile size of a TIFF: Pillow decodes whole tiles, and a tile may be larger than the image."""
    width, height = (image.tag_v2.get(tag, 1) for tag in _TIFF_TILE_SIZE)
    if width * height > max_pixels:
        raise ImageError(
            reason="too-many-pixels", detail=f"tile size {width} x {height} is over the limit of {max_pixels} pixels"
        )


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF or XMP orientation, 1 to 8. Return 1 if the orientation is missing or invalid."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
        return value if value in _TRANSPOSE else 1
    except Exception:  # damaged metadata must not fail the image
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    rgb = to_rgb(image)
    return rgb if orientation == 1 else rgb.transpose(_TRANSPOSE[orientation])


def _without_text(png: bytes) -> bytes:
    """Return a copy of a PNG without text chunks and colour profiles."""
    # Pillow rejects a PNG with more than a few megabytes of these.
    kept = [png[:8]]
    offset = 8
    while offset < len(png):
        if len(kept) > _MAX_PNG_CHUNKS:
            raise TooExpensiveError(f"the PNG has more than {_MAX_PNG_CHUNKS} chunks")
        end = offset + 12 + int.from_bytes(png[offset : offset + 4], "big")
        if png[offset + 4 : offset + 8] not in _PNG_TEXT:
            kept.append(png[offset:end])
        offset = end
    return b"".join(kept)


def _unsupported(data: bytes, name: str | None) -> ImageError:
    format_name = name or undecoded_format(data[:HEAD_BYTES])
    if format_name:
        return ImageError(reason="unsupported-image", detail=f"the image format {format_name} is not supported")
    return ImageError(reason="not-an-image", detail=f"the first bytes, {data[:8]!r}, match no image format")


def _damaged(error: Exception, name: str) -> ImageError:
    message = f"{error}" or type(error).__name__
    matching = (reason for pattern, reason in _REASONS_OF_MESSAGES if re.search(pattern, message, re.IGNORECASE))
    return ImageError(reason=next(matching, "corrupt"), detail=f"{name}: {message}")
