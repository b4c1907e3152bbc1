"""Augmented views of photos.

A view is a random crop as in Szegedy et al. (2015), with 35 % to 100 % of the area of the photo. Half of the views are
mirrored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from edje_index.images.decode import content_hash
from edje_index.training.data.sampling import VIEWS, stream

_AREA = (0.35, 1.0)
_ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Crops:
    """Which views to make of every photo.

    Attributes:
        views: number of views per photo.
        size: (height, width) of a view in pixels.
        seed: seed of the random crops.
    """

    views: int
    size: tuple[int, int]
    seed: int

    def view(self, photo: Image.Image, data: bytes, number: int) -> Image.Image:
        """Return view `number` of `photo`.

        The file contents `data` of the photo seed the random crop.
        """
        content = int(content_hash(data)[:32], 16)  # the views of a moved photo do not change
        return random_view(photo, self.size, stream(self.seed, VIEWS, content, number))


def random_view(photo: Image.Image, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Return a random crop of `photo`, resized to `size` (height, width). Mirror the crop with probability 1/2."""
    area, aspect = rng.uniform(*_AREA), np.exp(rng.uniform(*np.log(_ASPECT)))
    pixels = photo.width * photo.height * area
    width, height = min(photo.width, (pixels * aspect) ** 0.5), min(photo.height, (pixels / aspect) ** 0.5)
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    view = photo.resize(size[::-1], Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view
