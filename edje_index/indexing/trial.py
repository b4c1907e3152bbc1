"""Measures how long a few images take to decode and to encode, to estimate the time of a build."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edje_index.images.decode import ImageError
from edje_index.images.decoded_input import DecodeSettings, decode_input, read_input
from edje_index.images.inputs import InputRef
from edje_index.images.transient import TransientInputError
from edje_index.indexing.shard_encoding import stacked
from edje_index.indexing.shard_task import inputs_per_batch

if TYPE_CHECKING:
    import torch

    from edje_index.indexing.shard_task import Encoder


@dataclass(frozen=True)
class TrialTimes:
    """Mean times of the images of a trial.

    Attributes:
        images: number of images that were measured.
        decode_seconds: seconds to read, decode and preprocess one image in one thread.
        encode_seconds: seconds that the model takes per image.
    """

    images: int
    decode_seconds: float
    encode_seconds: float

    def seconds_per_image(self, decode_threads: int) -> float:
        """Return the seconds per image of one worker, which decodes the next images while the model runs."""
        return max(self.encode_seconds, self.decode_seconds / decode_threads)


def time_encoding(
    encoder: Encoder, refs: Sequence[InputRef], settings: DecodeSettings, *, batch_size: int
) -> TrialTimes | None:
    """Decode and encode the images of `refs`. Return None if none of them can be decoded.

    Args:
        encoder: encodes the images.
        refs: images or clips.
        settings: settings of decoding.
        batch_size: number of images, or of frames of clips, per forward pass.

    The first batch is encoded once before the measurement, because this prepares the model.
    """
    import torch

    started = time.perf_counter()
    pixels = [tensor for ref in refs if (tensor := _pixels(encoder, ref, settings)) is not None]
    decode_seconds = (time.perf_counter() - started) / max(1, len(refs))
    if not pixels:
        return None
    size = inputs_per_batch(batch_size, settings.frames)
    batches = [torch.stack(pixels[start : start + size]) for start in range(0, len(pixels), size)]
    encoder.encode(batches[0])
    started = time.perf_counter()
    for batch in batches:
        encoder.encode(batch)
    return TrialTimes(len(pixels), decode_seconds, (time.perf_counter() - started) / len(pixels))


def _pixels(encoder: Encoder, ref: InputRef, settings: DecodeSettings) -> torch.Tensor | None:
    try:
        decoded = decode_input(read_input(ref), ref.uri, settings, encoder.preprocess)
        return decoded.pixels if settings.frames is None else stacked(decoded.frames)
    except (ImageError, TransientInputError):
        return None
