"""Converts a decoded image to the input of the vision tower, bit for bit as open_clip
does with Pillow 13.

open_clip resizes and crops the image. The remaining steps convert each byte to a number
that depends only on the byte and its channel. A table of 3 x 256 numbers replaces these
steps, because a table is faster and starts no torch threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from edje_index.images.decode import ImageError
from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import eval_transform, preprocess_settings


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
        settings = preprocess_settings(config)
        side = settings.size
        self._size = (side, side) if isinstance(side, int) else (side[1], side[0])
        self._resampling = Image.Resampling.BICUBIC
        if settings.interpolation == "bilinear":
            self._resampling = Image.Resampling.BILINEAR
        self._mode = settings.resize_mode

    def __call__(self, image: Image.Image) -> torch.Tensor:
        from edje_index.images.resize import normalize

        return torch.from_numpy(normalize(self.pixels(image), self._table))

    def resize(self, image: Image.Image) -> Image.Image:
        """Return the image (RGB) as the vision tower reads it: resized and cropped.

        Raises:
            ImageError: the image is too narrow to be resized.
        """
        return Image.fromarray(np.ascontiguousarray(self.pixels(image)[:, :, :3]))

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the bytes of the result of `resize`, [height, width, 4]. The last byte
        of a pixel has no meaning.
        """
        # loads Numba, which a search for a caption does not need
        from edje_index.images.resize import resize

        width, height = self._size
        if self._mode == "squash":
            box = (0, 0, width, height)
            return resize(image, self._size, box, self._resampling)
        longer = int(width * max(image.size) / min(image.size))
        if self._mode == "shortest" and width == height:
            # as torchvision: the shorter side becomes `width`
            size = (width, longer) if image.width < image.height else (longer, width)
            left = round((size[0] - width) / 2)
            top = round((size[1] - width) / 2)
            box = (left, top, left + width, top + width)
            return resize(image, size, box, self._resampling)
        try:
            resized = image
            for step in self._geometry:
                resized = step(resized)
        except ValueError as error:
            # a side would have no pixels
            raise ImageError(
                reason="extreme-aspect-ratio",
                detail=f"{image.width} x {image.height} pixels cannot be resized:"
                f" {error}",
            ) from error
        return np.asarray(resized.convert("RGBX"))
