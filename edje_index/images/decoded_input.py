"""Reads and decodes one input. A build and online training share this code, so that they treat bad images alike.

An input is decoded to frames: an image to one frame, a clip to the number of frames in the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from PIL.Image import Image

from edje_index.images import clips
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
            A truncated clip always fails.
        frames: number of frames per input, to decode images and clips. The frame of an image is repeated. None decodes
            only images, to one frame each, and rejects clips.
    """

    max_pixels: int = DEFAULT_MAX_PIXELS
    truncated: str = FAIL
    frames: int | None = None


@dataclass(frozen=True)
class DecodedInput(Generic[Pixels]):
    """A decoded image or clip.

    Attributes:
        size: (width, height) of the upright image in the file, or of the first upright frame.
        frames: the converted frames. An image has one frame, unless the settings ask for more.
        truncation: description of what is missing; None for a complete input.
    """

    size: tuple[int, int]
    frames: tuple[Pixels, ...]
    truncation: str | None

    @property
    def pixels(self) -> Pixels:
        """The first converted frame."""
        return self.frames[0]


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
    """Decode the bytes of the input `uri`, and apply `convert` to each RGB frame.

    Raises:
        ImageError: the input cannot be decoded or converted.
        TransientInputError: there is too little memory at this moment.
    """
    if settings.frames is not None and clips.is_clip(data):
        most_bytes = clips.BYTES_PER_PIXEL * min(settings.max_pixels, clips.MAX_FRAME_PIXELS)
        return retry_memory(lambda: _decode_clip(data, settings, convert), uri, most_bytes)
    return retry_memory(lambda: _decode_image(data, settings, convert), uri, BYTES_PER_PIXEL * settings.max_pixels)


def _decode_image(data: bytes, settings: DecodeSettings, convert: Callable[[Image], Pixels]) -> DecodedInput[Pixels]:
    truncation = None
    if settings.truncated == LOAD:
        image, truncation = decode_partial(data, settings.max_pixels)
    else:
        image = decode_rgb(data, settings.max_pixels)
    return DecodedInput(image.size, (convert(image),) * (settings.frames or 1), truncation)


def _decode_clip(data: bytes, settings: DecodeSettings, convert: Callable[[Image], Pixels]) -> DecodedInput[Pixels]:
    sizes: list[tuple[int, int]] = []
    frames: list[Pixels] = []
    for image in clips.decode_frames(data, settings.frames or 1, settings.max_pixels):
        sizes.append(image.size)
        frames.append(convert(image))
    return DecodedInput(sizes[0], tuple(frames), None)
