"""Decodes an image or a clip to the number of frames that the settings give. An image
has only one frame, which is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from PIL.Image import Image

from edje_index.images import clips
from edje_index.images.decode import DEFAULT_MAX_PIXELS, decode_partial, decode_rgb
from edje_index.images.decode_limits import BYTES_PER_PIXEL
from edje_index.images.transient import retry

FAIL = "fail"
LOAD = "load"
"""Values of `DecodeSettings.truncated`. With `FAIL`, a truncated image fails. With
`LOAD`, its readable part is loaded.
"""

Pixels = TypeVar("Pixels")


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding that change its result.

    Attributes:
        max_pixels: limit on the pixels of an image. Larger images fail with the reason
            "too-many-pixels".
        truncated: what to do with a truncated image. `FAIL`: the image fails. `LOAD`:
            the readable part is loaded.
        frames: number of frames per input. With a number, images and clips are decoded,
            and the only frame of an image is repeated. With None, images are decoded to
            one frame, and clips are rejected.
    """

    max_pixels: int = DEFAULT_MAX_PIXELS
    truncated: str = FAIL
    frames: int | None = None

    def inputs_per_batch(self, batch_size: int) -> int:
        """Return the number of inputs in a forward pass of `batch_size` frames. The
        number is 1 if an input has more frames than `batch_size`.
        """
        return max(1, batch_size // (self.frames or 1))


def decode_input(
    data: bytes, uri: str, settings: DecodeSettings, convert: Callable[[Image], Pixels]
) -> tuple[tuple[int, int], list[Pixels], str | None]:
    """Decode the bytes of the input `uri`, and apply `convert` to each RGB frame.

    Returns:
        (size, frames, truncation). `size` is the (width, height) of the upright image,
        or of the first frame of a clip. `frames` has the converted frames. `truncation`
        describes where a truncated image ends, and is None for all other inputs.

    Raises:
        ImageError: the input cannot be decoded or converted.
        TransientInputError: there is too little memory at this moment.
    """
    if settings.frames is not None and clips.is_clip(data):

        def decode_clip() -> list[tuple[tuple[int, int], Pixels]]:
            frames = clips.decode_frames(
                data, settings.frames or 1, settings.max_pixels
            )
            return [(frame.size, convert(frame)) for frame in frames]

        enough_bytes = clips.BYTES_PER_PIXEL * min(
            settings.max_pixels, clips.MAX_FRAME_PIXELS
        )
        sizes, frames = zip(*retry(decode_clip, uri, enough_bytes), strict=True)
        return sizes[0], list(frames), None

    def decode_image() -> tuple[tuple[int, int], list[Pixels], str | None]:
        if settings.truncated == LOAD:
            image, truncation = decode_partial(data, settings.max_pixels)
        else:
            image = decode_rgb(data, settings.max_pixels)
            truncation = None
        return image.size, [convert(image)] * (settings.frames or 1), truncation

    return retry(decode_image, uri, BYTES_PER_PIXEL * settings.max_pixels)
