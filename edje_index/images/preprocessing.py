"""Resizes and crops a decoded image for the vision tower, bit for bit as open_clip does
with Pillow 13.

The resulting pixels are bytes, because float32 would take four times as much memory and
four times as long to copy. `edje_index.indexing.image_encoder` normalises a whole batch
on the device of the model.
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
    """Callable that converts a PIL image (RGB) to a tensor of bytes, uint8 [3, height,
    width]. Thread-safe.

    A call raises ``ImageError`` if the image is too narrow to be resized.

    Attributes:
        shape: (3, height, width) of a result.
        scale: the second argument of `normalize`, float32 [3, 3, 1, 1]. The first axis
            has the largest byte value (255), the mean and the standard deviation. The
            second axis has the three channels.
    """

    def __init__(self, config: ClipConfig) -> None:
        # The last two steps, conversion to floats and normalisation, are left out,
        # because `normalize` does them.
        self._geometry = eval_transform(config).transforms[:-2]
        settings = preprocess_settings(config)
        scale = np.array([(255.0,) * 3, settings.mean, settings.std], np.float32)
        self.scale = torch.from_numpy(scale[..., None, None])
        side = settings.size
        # (width, height), while `settings` has one side of a square or (height, width)
        self._size = (side, side) if isinstance(side, int) else (side[1], side[0])
        self._resampling = Image.Resampling.BICUBIC
        if settings.interpolation == "bilinear":
            self._resampling = Image.Resampling.BILINEAR
        self._mode = settings.resize_mode
        self.shape = (3, self._size[1], self._size[0])

    def __call__(
        self, image: Image.Image, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Convert an image. The result is written to `out`, if it is given."""
        from edje_index.images.resize import channels

        if out is None:
            out = torch.empty(self.shape, dtype=torch.uint8, device="cpu")
        channels(self.pixels(image).reshape(-1), out.numpy().reshape(-1))
        return out

    def resize(self, image: Image.Image) -> Image.Image:
        """Return the image (RGB) as the vision tower reads it: resized and cropped.

        Raises:
            ImageError: the image is too narrow to be resized.
        """
        return Image.fromarray(self.pixels(image)[:, :, :3].copy())

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the same pixels as `resize`, but as an array [height, width, 4]. The
        last byte of a pixel has no meaning. The next call in this thread may overwrite
        the array.
        """
        # Imported here, because the module loads Numba, which a search for a caption
        # does not need.
        from edje_index.images.resize import resize

        width, height = self._size
        if self._mode == "squash":
            box = (0, 0, width, height)
            return resize(image, self._size, box, self._resampling)
        longer = int(width * max(image.size) / min(image.size))
        if self._mode == "shortest" and width == height:
            # As in torchvision, the shorter side becomes `width`, and the crop is a
            # square in the centre.
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
            # A side of the resized image would have no pixels.
            raise ImageError(
                "extreme-aspect-ratio",
                f"{image.width} x {image.height} pixels cannot be resized: {error}",
            ) from error
        return np.asarray(resized.convert("RGBX"))


def normalize(pixels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the input of the vision tower, float32 [..., 3, height, width], with the
    same numbers as in open_clip.

    Args:
        pixels: results of a `Preprocessor`, uint8 [..., 3, height, width].
        scale: `Preprocessor.scale`, on the device of `pixels`.
    """
    # The divisors are tensors. To divide by a Python number, torch multiplies by its
    # reciprocal on a GPU, which rounds differently.
    largest, mean, deviation = scale
    return pixels.float().div_(largest).sub_(mean).div_(deviation)
