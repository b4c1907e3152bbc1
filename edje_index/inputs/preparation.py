"""Prepares inputs for the model: reads, hashes, decodes and resizes them.

The processes of `edje_index.inputs.helpers` call this module, so it does not import
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from edje_index.images import clips
from edje_index.images.decode import (
    DEFAULT_MAX_PIXELS,
    ImageError,
    content_hash,
    decode_partial,
    decode_rgb,
)
from edje_index.images.decode_limits import BYTES_PER_PIXEL
from edje_index.images.preprocessing import Preprocessor
from edje_index.images.transient import retry
from edje_index.inputs.refs import InputRef, read_bytes
from storage_formats.format.rows import FAILED

Pixels: TypeAlias = NDArray[np.uint8]
Columns: TypeAlias = dict[str, Any]
"""Columns of the rows table that preparation knows, by name. An input that cannot be
prepared has the status "failed", a reason and a detail.
"""
Job: TypeAlias = tuple[int, InputRef]
"""An input, and the position at which its pixels belong."""


def failed(reason: str, detail: str) -> Columns:
    """Return the columns of an input that cannot be prepared."""
    return {"status": FAILED, "reason": reason, "detail": detail}


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding that change its result.

    Attributes:
        max_pixels: limit on the pixels of an image. Larger images fail with the reason
            "too-many-pixels".
        truncated: what to do with a truncated image. "fail": the image fails. "load":
            the readable part is loaded.
        frames: number of frames per input. With a number, images and clips are decoded,
            and the only frame of an image is repeated. With None, images are decoded to
            one frame, and clips are rejected.
    """

    max_pixels: int = DEFAULT_MAX_PIXELS
    truncated: str = "fail"
    frames: int | None = None

    def inputs_per_batch(self, batch_size: int) -> int:
        """Return the number of inputs in a forward pass of `batch_size` frames. The
        number is 1 if an input has more frames than `batch_size`.
        """
        return max(1, batch_size // (self.frames or 1))


def decode_input(
    data: bytes,
    uri: str,
    settings: DecodeSettings,
    convert: Callable[[Image, Pixels], object],
    out: Pixels,
) -> Columns:
    """Decode the bytes of the input `uri`, write its pixels to `out`, and return its
    columns.

    The width and the height are those of the upright image, or of the first frame of a
    clip. The detail says where a truncated image ends.

    Args:
        convert: function that writes the pixels of an RGB frame to an array.
        out: pixels of the input. If the settings have a number of frames, this is the
            length of the first axis.

    Raises:
        ImageError: the input cannot be decoded or converted.
        TransientInputError: there is too little memory at this moment.
    """
    targets = out[np.newaxis] if settings.frames is None else out
    is_clip = settings.frames is not None and clips.is_clip(data)
    max_pixels = settings.max_pixels
    enough_bytes = BYTES_PER_PIXEL * max_pixels
    if is_clip:
        enough_bytes = clips.BYTES_PER_PIXEL * min(max_pixels, clips.MAX_FRAME_PIXELS)

    def decode() -> Columns:
        truncation = None
        frames: Iterable[Image]
        if is_clip:
            frames = clips.decode_frames(data, len(targets), max_pixels)
        elif settings.truncated == "load":
            image, truncation = decode_partial(data, max_pixels)
            frames = [image]
        else:
            frames = [decode_rgb(data, max_pixels)]
        sizes = []
        for frame, target in zip(frames, targets, strict=False):
            convert(frame, target)
            sizes.append(frame.size)
        # The only frame of an image is repeated.
        targets[len(sizes) :] = targets[0]
        width, height = sizes[0]
        return {"width": width, "height": height, "detail": truncation}

    return retry(decode, uri, enough_bytes)


@dataclass(frozen=True)
class Preparation:
    """How inputs are prepared.

    Attributes:
        decoding: settings of decoding.
        preprocess: resizes and crops the decoded images. None only reads and hashes
            the inputs.
    """

    decoding: DecodeSettings = field(default_factory=DecodeSettings)
    preprocess: Preprocessor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pixels of an input: (3, height, width), or for clips (frames, 3,
        height, width).
        """
        if self.preprocess is None:
            return (0,)
        frames = self.decoding.frames
        return (
            self.preprocess.shape
            if frames is None
            else (frames, *self.preprocess.shape)
        )

    def run(self, ref: InputRef, out: Pixels) -> Columns:
        """Prepare one input, write its pixels to `out`, and return its columns.

        Raises:
            TransientInputError: the input cannot be read or decoded because of a
                problem of the machine.
        """
        columns: Columns = {}
        started = time.perf_counter()
        try:
            data = read_bytes(ref)
            columns["size"] = len(data)
            columns["content_hash"] = content_hash(data)
            if ref.content_hash not in (None, columns["content_hash"]):
                raise ImageError(
                    reason="changed-since-plan",
                    detail="the file has changed since the build was planned",
                )
            columns["read_seconds"] = time.perf_counter() - started
            if self.preprocess is not None:
                started = time.perf_counter()
                columns |= decode_input(
                    data, ref.uri, self.decoding, self.preprocess.array, out
                )
                columns["decode_seconds"] = time.perf_counter() - started
        except ImageError as error:
            columns |= failed(error.reason, error.detail)
        return columns
