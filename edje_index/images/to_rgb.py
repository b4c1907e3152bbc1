"""Conversion of a decoded picture of any mode to 8-bit RGB.

Choices, where a format leaves one:

- Transparency is composited over white. The towers were trained on collections downloaded that way (img2dataset
  composites over white), and the colours of transparent pixels are arbitrary.
- ICC profiles are not applied: open_clip's transforms, with which the towers were trained, do not apply them either.
- 16-bit samples keep their high byte, in grey as in colour. Other wide samples (32-bit integers, floats) have no
  agreed white level: see `_narrow`.
- CMYK in JPEG is read as inverted (Adobe's convention, which nearly every such file follows).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_SMALLEST_SPAN = 1e-30  # 255 / span overflows float32 below it
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a picture of any Pillow mode to mode RGB."""
    if image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        return Image.fromarray(_narrow(image)).convert("RGB")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return _over_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    """Composite alpha, palette transparency or a transparent colour over white; opaque pictures just lose alpha."""
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
    """Convert grey of 9 to 16 bits per sample to its 8 high bits, with TIFF's 12-bit and white-is-zero variants."""
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
    """Convert 32-bit integers or floats [h, w] to bytes.

    Integers between 0 and 65535 are 16-bit samples (Pillow opens 16-bit PGM so), or 8-bit samples if they are from a
    TIFF and all fit in a byte. Floats between 0 and 1 are fractions of white. All other values are stretched: the
    smaller of 0 and the minimum becomes black, the maximum white. NaN becomes black, and an infinity the nearest end
    of the finite range.
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
