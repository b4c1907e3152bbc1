"""Decodes images in requests. URLs are never fetched."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING

from edje_index.images.decode import ImageError, decode_rgb
from pipelines.service.errors import ServiceError

if TYPE_CHECKING:
    from PIL import Image

_DATA_URI = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(;[\w=-]+)*;base64,", re.ASCII | re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)


def is_data_uri(text: str) -> bool:
    """Return True if `text` is a data URI, False for any other text."""
    return text[:5].lower() == "data:"


def image_bytes(text: str) -> bytes:
    """Return the encoded bytes of an image that a client sent.

    Args:
        text: a data URI with base64, or base64 alone.

    Raises:
        ServiceError: status 422 if `text` is a URL or is not valid base64.
    """
    match = _DATA_URI.match(text[:200])
    if match is None and _ADDRESS.match(text[:40]):
        raise ServiceError(422, "send an image as base64 or as a data URI with base64; URLs are not fetched")
    try:
        return base64.b64decode(text[match.end() if match else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ServiceError(422, "an image is not valid base64; send the bytes of the image file as base64") from error


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """Decode an image. Return the image upright and in mode RGB.

    Raises:
        ServiceError: status 422 if `data` cannot be decoded, 413 if the image has more than `max_pixels` pixels.
    """
    try:
        return decode_rgb(data, max_pixels)
    except ImageError as error:
        status = 413 if error.reason == "too-many-pixels" else 422
        raise ServiceError(status, f"cannot read an image: {error}") from error
