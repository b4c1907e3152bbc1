"""Converts a decoded image to the input of the vision tower, bit for bit as open_clip
does.

open_clip resizes and crops the image. The remaining steps convert each byte to a number
that depends only on the byte and its channel. A table of 3 x 256 numbers replaces these
steps, because a table is faster and starts no torch threads.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from edje_index.images.decode import ImageError
from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import eval_transform


class Preprocessor:
    """Callable that converts a PIL image (RGB) to a float32 tensor [3, height, width].
    Thread-safe.

    A call raises ``ImageError`` if the image is too narrow to be resized.
    """

    def __init__(self, config: ClipConfig) -> None:
        steps = eval_transform(config).transforms
        self._geometry = steps[:-2]
        to_tensor, normalize = steps[-2:]
        levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
        # every byte in every channel, [3, 1, 256]
        normalized = normalize(to_tensor(Image.fromarray(levels)))
        self._table = np.ascontiguousarray(normalized[:, 0].numpy())

    def __call__(self, image: Image.Image) -> torch.Tensor:
        values = np.asarray(self.resize(image))
        pixels = np.empty((3, *values.shape[:2]), np.float32)
        for channel in range(3):
            np.take(
                self._table[channel],
                values[:, :, channel],
                out=pixels[channel],
                mode="clip",
            )
        return torch.from_numpy(pixels)

    def resize(self, image: Image.Image) -> Image.Image:
        """Return the image (RGB) as the vision tower reads it: resized and cropped.

        Raises:
            ImageError: the image is too narrow to be resized.
        """
        width, height = image.size
        try:
            for step in self._geometry:
                image = step(image)
        except ValueError as error:
            # a side would have no pixels
            raise ImageError(
                reason="extreme-aspect-ratio",
                detail=f"{width} x {height} pixels cannot be resized: {error}",
            ) from error
        return image
