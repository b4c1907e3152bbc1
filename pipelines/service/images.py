"""Pictures in requests: base64 or data URIs, decoded within limits. URLs are never fetched."""

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
    """Whether `text` is a picture rather than the uri of a row."""
    return text[:5].lower() == "data:"


def picture_bytes(text: str) -> bytes:
    """The bytes of a picture that a client sent.

    Args:
        text: a data URI, or base64.

    Raises:
        ServiceError: 422, it is a URL or not base64.
    """
    match = _DATA_URI.match(text[:200])
    if match is None and _ADDRESS.match(text[:40]):
        raise ServiceError(422, "send an image as base64 or as a data URI with base64; URLs are not fetched")
    try:
        return base64.b64decode(text[match.end() if match else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ServiceError(422, "an image is not valid base64; encode its bytes again") from error


def decode_picture(data: bytes, max_pixels: int) -> Image.Image:
    """The picture, upright and in mode RGB.

    Raises:
        ServiceError: 422, it cannot be decoded; 413, it has too many pixels.
    """
    try:
        return decode_rgb(data, max_pixels)
    except ImageError as error:
        status = 413 if error.reason == "too-many-pixels" else 422
        raise ServiceError(status, f"cannot read an image: {error}") from error
