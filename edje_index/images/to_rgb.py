"""Converts decoded images of any mode to 8-bit RGB.

- Transparent images are composited over white, as in the training data of the towers (img2dataset).
- ICC profiles are ignored, as in open_clip.
- 16-bit samples are reduced to their high byte. `_from_32_bits` converts 32-bit integers and floats.
- CMYK values in a JPEG are inverted, because Adobe programs write them inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_ToBytes = Callable[[NDArray[Any]], NDArray[np.uint8]]
_SMALLEST_SPAN = 1e-30  # 255 / span overflows float32 below it
_BAND_PIXELS = 1 << 20
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any Pillow mode to mode RGB."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        grey, top = Image.new("L", image.size), 0
        to_bytes = _from_16_bits(image) if image.mode.startswith("I;16") else _from_32_bits(image)
        for band in _bands(image):
            grey.paste(Image.fromarray(to_bytes(band)), (0, top))
            top += len(band)
        return grey.convert("RGB")
    if image.mode not in _WITH_ALPHA and "transparency" not in image.info:
        return image if image.mode == "RGB" else image.convert("RGB")
    key = image.info.get("transparency")
    if isinstance(key, tuple) and max(key) > 255:  # 16-bit colour, decoded to its high bytes
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if image.mode == "La":  # Pillow converts premultiplied grey to grey with alpha only
        image = image.convert("LA")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):  # opaque
        return image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _bands(image: Image.Image) -> Iterator[NDArray[Any]]:
    """Yield bands of rows of a grey image, each as samples [h, w]."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))


def _from_16_bits(image: Image.Image) -> _ToBytes:
    """Return a function that converts samples of 9 to 16 bits to their 8 high bits."""
    tags: Any = getattr(image, "tag_v2", {})
    bits = max(tags.get(_TIFF_BITS, (16,)))
    white_is_zero = tags.get(_TIFF_PHOTOMETRIC) == 0

    def to_bytes(band: NDArray[Any]) -> NDArray[np.uint8]:
        values = band.astype(np.uint16, copy=False)
        if white_is_zero:
            values = np.uint16((1 << bits) - 1) - values
        grey = np.asarray(values >> (bits - 8), dtype=np.uint8)
        if "transparency" in image.info:
            grey[values == image.info["transparency"]] = 255
        return grey

    return to_bytes


def _from_32_bits(image: Image.Image) -> _ToBytes:
    """Return a function that converts the 32-bit samples of `image` to bytes."""
    # Integers between 0 and 65535 are 16-bit samples, because Pillow opens 16-bit PGM files in this mode. In a TIFF,
    # they are 8-bit samples if all of them fit in a byte. Floats between 0 and 1 are fractions of white. All other
    # values are scaled linearly: the minimum, or 0 if the minimum is above 0, becomes black, the maximum white.
    low = high = 0.0
    for band in _bands(image):
        finite = band[np.isfinite(band)]
        low = min(low, float(finite.min(initial=0)))
        high = max(high, float(finite.max(initial=0)))
    if image.mode == "I" and low >= 0 and high <= 0xFFFF:
        bits = 8 if image.format == "PPM" or high > 0xFF else 0
        return lambda band: np.asarray(band >> bits, dtype=np.uint8)
    if image.mode == "F" and low == 0.0 and high <= 1.0:
        high = 1.0
    share = np.float32(255 / max(high - low, _SMALLEST_SPAN))

    def stretch(band: NDArray[Any]) -> NDArray[np.uint8]:
        finite = np.nan_to_num(band.astype(np.float32), nan=low, posinf=high, neginf=low)
        scaled = finite * share - np.float32(low) * share
        return np.asarray(np.rint(scaled.clip(0, 255)), dtype=np.uint8)

    return stretch
