"""Reads and decodes one input. A build and online training share this code, so that they treat bad images alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from PIL.Image import Image

from edje_index.images.decode import DEFAULT_MAX_PIXELS, decode_partial, decode_rgb
from edje_index.images.decode_limits import BYTES_PER_PIXEL
from edje_index.images.inputs import MAX_INPUT_BYTES, InputRef, read_bytes
from edje_index.images.transient import retry_memory

FAIL, LOAD = "fail", "load"
"""What to do with a truncated image: report it as failed, or load the readable part."""

Pixels = TypeVar("Pixels")


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding that change its result.

    Attributes:
        max_pixels: limit on the pixels of an image. Larger images fail with the reason "too-many-pixels".
        truncated: what to do with a truncated image. `FAIL`: the image fails. `LOAD`: the readable part is loaded.
    """

    max_pixels: int = DEFAULT_MAX_PIXELS
    truncated: str = FAIL


@dataclass(frozen=True)
class DecodedInput(Generic[Pixels]):
    """A decoded image.

    Attributes:
        size: (width, height) of the upright image, before it is converted.
        pixels: the converted image.
        truncation: description of what is missing; None for a complete image.
    """

    size: tuple[int, int]
    pixels: Pixels
    truncation: str | None


def read_input(ref: InputRef) -> bytes:
    """Read all bytes of an input. If memory is short, reading is tried again for some seconds.

    Raises:
        ImageError: the input cannot be read.
        TransientInputError: reading still fails, for a reason that lies outside the input.
    """
    return retry_memory(lambda: read_bytes(ref), ref.uri, MAX_INPUT_BYTES)


def decode_input(
    data: bytes, uri: str, settings: DecodeSettings, convert: Callable[[Image], Pixels]
) -> DecodedInput[Pixels]:
    """Decode the bytes of the input `uri`, and apply `convert` to the RGB image.

    Raises:
        ImageError: the image cannot be decoded or converted.
        TransientInputError: there is too little memory at this moment.
    """

    def decode() -> DecodedInput[Pixels]:
        truncation = None
        if settings.truncated == LOAD:
            image, truncation = decode_partial(data, settings.max_pixels)
        else:
            image = decode_rgb(data, settings.max_pixels)
        return DecodedInput(image.size, convert(image), truncation)

    return retry_memory(decode, uri, BYTES_PER_PIXEL * settings.max_pixels)
