"""From the bytes of one input to an upright 8-bit RGB picture, or to the reason why there is none.

What a pixel becomes, where a format leaves a choice:

- Transparency is laid over white. The towers were trained on collections that were downloaded that way
  (img2dataset composites over white), and colours under transparent pixels are whatever the writer left.
- ICC profiles are not applied: neither do open_clip's transforms, with which the towers were trained.
- EXIF orientation is applied. Damaged metadata never costs the picture.
- Of animations and multi-page files the first frame is taken.
- 16-bit samples keep their high byte, in grey as in colour. Other wide samples (32-bit integers, floats)
  have no agreed white: see `_narrow`.
- CMYK in JPEG is read as inverted (Adobe's convention, which is that of nearly every such file).
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile

from edje_index.images.headers import HEAD_BYTES, canvas_size, image_format, undecoded_format
from edje_index.images.pillow_setup import ignore_warnings, openers

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
    "too-many-bytes",
    "too-many-pixels",
    "truncated",
    "truncated-archive",
    "unreadable",
    "unsupported-image",
    "unsupported-member",
)
"""Every reason for which an input may have no block."""

DEFAULT_MAX_PIXELS = 89_478_485
"""Pillow's own threshold of suspicion: a quarter of 1 GiB at 3 bytes a pixel."""

MAX_ASPECT_RATIO = 256
"""Longer side over shorter: scaling the shorter one to a tower's input makes the longer one this many times that."""

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
# What decoders say, and what it comes to; anything else is "corrupt".
_DAMAGE = (("truncat|unexpected end|EOF", "truncated"), ("unknown pixel mode|unsupported", "unsupported-image"))
_SMALLEST_SPAN = 1e-30  # below it 255 / span leaves float32
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262
_TIFF_TILE_SIZE = (322, 323)
_PNG_TEXT = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})


class ImageError(Exception):
    """An input that cannot become a block; it becomes a failed row with `reason` and `detail`.

    Attributes:
        reason: one of `REASONS`.
        detail: what was found, for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def content_hash(data: bytes) -> str:
    """SHA-256 of an input's bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def decode_rgb(data: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Decode an image file: mode RGB, upright, first frame. May be called from many threads at once.

    Args:
        data: the whole file.
        max_pixels: a header that declares more fails before anything of that size is allocated.

    Raises:
        ImageError: and nothing else, whatever the bytes.
    """
    if not data:
        raise ImageError("empty", "0 bytes")
    ignore_warnings()
    name = image_format(data[:HEAD_BYTES])
    if name is None or name not in openers():
        raise _not_decoded(data, name)
    try:
        try:
            return _decode(data, name, max_pixels)
        except ValueError as error:
            if name != "PNG" or "MAX_TEXT" not in str(error):
                raise
            return _decode(_without_text(data), name, max_pixels)
    except ImageError:
        raise
    except Exception as error:  # decoders raise anything at all on damaged input
        raise _damage(error, name) from error


def _decode(data: bytes, name: str, max_pixels: int) -> Image.Image:
    _check_size(canvas_size(data, name) or (1, 1), max_pixels)
    image = openers()[name](io.BytesIO(data), "")
    _check_size(image.size, max_pixels)
    if name == "TIFF":
        _check_tile(image, max_pixels)
    image.load()
    return _upright(image, _orientation(image))


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageError("too-many-pixels", f"{width} x {height} is over the limit of {max_pixels} pixels")
    if max(size) > MAX_ASPECT_RATIO * max(1, min(size)):
        raise ImageError("extreme-aspect-ratio", f"{width} x {height} is over the limit of {MAX_ASPECT_RATIO} to 1")


def _check_tile(image: Any, max_pixels: int) -> None:
    """A TIFF tile is decoded whole, and may be larger than its image."""
    width, height = (image.tag_v2.get(tag, 1) for tag in _TIFF_TILE_SIZE)
    if width * height > max_pixels:
        raise ImageError("too-many-pixels", f"tiles of {width} x {height}, over the limit of {max_pixels} pixels")


def _orientation(image: ImageFile.ImageFile) -> int:
    """EXIF (or XMP) orientation 1 - 8; 1 where it is missing, damaged or senseless."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
        return value if value in _TRANSPOSE else 1
    except Exception:  # metadata is optional, so no damage in it is worth losing the picture for
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    rgb = _to_rgb(image)
    return rgb if orientation == 1 else rgb.transpose(_TRANSPOSE[orientation])


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        return Image.fromarray(_narrow(image)).convert("RGB")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return _over_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    """Alpha, palette transparency or a transparent colour, over white. Opaque images lose the channel only."""
    key = image.info.get("transparency")
    if isinstance(key, tuple) and max(key) > 255:  # 16-bit colour, decoded to its high bytes
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if image.mode == "La":  # Pillow converts premultiplied grey to grey with alpha only
        image = image.convert("LA")
    image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Grey of 9 - 16 bits a sample to its 8 high bits; TIFF's 12-bit and white-is-zero variants included."""
    values = np.asarray(image).astype(np.uint16, copy=False)
    tags: Any = getattr(image, "tag_v2", {})
    bits = max(tags.get(_TIFF_BITS, (16,)))
    if tags.get(_TIFF_PHOTOMETRIC) == 0:
        values = np.uint16((1 << bits) - 1) - values
    grey = (values >> (bits - 8)).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")


def _narrow(image: Image.Image) -> NDArray[np.uint8]:
    """32-bit integers or floats [h, w] to bytes.

    Integers within 0 - 65535 are taken for 16-bit samples (Pillow's mode for 16-bit PGM), unless a TIFF's all fit
    a byte. Floats within 0 - 1 are taken for shares of white. All others are stretched: the smaller of 0 and
    the minimum becomes black, the maximum white. NaN is black, infinities are the ends of the finite range.
    """
    values = np.asarray(image)
    if image.mode == "I" and values.min() >= 0 and values.max() <= 0xFFFF:
        wide = image.format == "PPM" or values.max() > 0xFF
        return (values >> (8 if wide else 0)).astype(np.uint8)
    finite = values[np.isfinite(values)]
    low, high = min(0.0, float(finite.min(initial=0))), float(finite.max(initial=0))
    if image.mode == "F" and low == 0.0 and high <= 1.0:
        high = 1.0
    share = np.float32(255 / max(high - low, _SMALLEST_SPAN))
    scaled = (
        np.nan_to_num(values.astype(np.float32), nan=low, posinf=high, neginf=low) * share - np.float32(low) * share
    )
    return np.asarray(np.rint(scaled.clip(0, 255)), dtype=np.uint8)


def _without_text(png: bytes) -> bytes:
    """A PNG less its text and colour-profile chunks, of which Pillow refuses to hold more than some megabytes."""
    kept = [png[:8]]
    place = 8
    while place < len(png):
        end = place + 12 + int.from_bytes(png[place : place + 4], "big")
        if png[place + 4 : place + 8] not in _PNG_TEXT:
            kept.append(png[place:end])
        place = end
    return b"".join(kept)


def _not_decoded(data: bytes, name: str | None) -> ImageError:
    """The error for bytes that no decoder is tried on."""
    known = name or undecoded_format(data[:HEAD_BYTES])
    if known:
        return ImageError("unsupported-image", f"{known} images are not decoded here")
    return ImageError("not-an-image", f"begins with {data[:8]!r}, which no image format does")


def _damage(error: Exception, name: str) -> ImageError:
    """The error for a file that its decoder gave up on."""
    said = f"{error}" or type(error).__name__
    reason = next((reason for words, reason in _DAMAGE if re.search(words, said, re.IGNORECASE)), "corrupt")
    return ImageError(reason, f"{name}: {said}")
