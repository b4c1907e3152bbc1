"""Decodes one input. A build and online training share this code, so that they treat bad images alike.

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
from edje_index.images.transient import retry

FAIL, LOAD = "fail", "load"
"""What to do with a truncated image: report it as failed, or load the readable part."""

Pixels = TypeVar("Pixels")


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding that change its result.

    Attributes:
        max_pixels: limit on the pixels of an image. Larger images fail with the reason "too-many-pixels".
        truncated: what to do with a truncated image. `FAIL`: the image fails. `LOAD`: the readable part is loaded.
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


def decode_input(
    data: bytes, uri: str, settings: DecodeSettings, convert: Callable[[Image], Pixels]
) -> DecodedInput[Pixels]:
    """Decode the bytes of the input `uri`, and apply `convert` to each RGB frame.

    Raises:
        ImageError: the input cannot be decoded or converted.
        TransientInputError: there is too little memory at this moment.
    """

    def decode_image() -> DecodedInput[Pixels]:
        truncation = None
        if settings.truncated == LOAD:
            image, truncation = decode_partial(data, settings.max_pixels)
        else:
            image = decode_rgb(data, settings.max_pixels)
        return DecodedInput(image.size, (convert(image),) * (settings.frames or 1), truncation)

    def decode_clip() -> DecodedInput[Pixels]:
        images = clips.decode_frames(data, settings.frames or 1, settings.max_pixels)
        sizes, frames = zip(*((image.size, convert(image)) for image in images), strict=True)
        return DecodedInput(sizes[0], frames, None)

    if settings.frames is not None and clips.is_clip(data):
        most_bytes = clips.BYTES_PER_PIXEL * min(settings.max_pixels, clips.MAX_FRAME_PIXELS)
        return retry(decode_clip, uri, most_bytes)
    return retry(decode_image, uri, BYTES_PER_PIXEL * settings.max_pixels)
