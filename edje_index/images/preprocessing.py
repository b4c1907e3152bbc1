"""Resizes and crops a decoded image for the vision tower, bit for bit as open_clip does
with Pillow 13.

The resulting pixels are bytes, because float32 would take four times as much memory and
four times as long to copy. `edje_index.indexing.image_encoder` normalises a whole batch
on the device of the model.

Only the process that creates a `Preprocessor` imports torch. Helper processes unpickle
a `Preprocessor`, and call it without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edje_index.images.decode import ImageError
from edje_index.models.clip_config import ClipConfig

if TYPE_CHECKING:
    import torch


class Preprocessor:
    """Converts PIL images (RGB) to bytes, uint8 [3, height, width]. Thread-safe and
    picklable.

    All methods raise ``ImageError`` if the image is too narrow to be resized.

    Attributes:
        shape: (3, height, width) of a result.
    """

    def __init__(self, config: ClipConfig) -> None:
        from edje_index.models.clip_model import preprocess_settings

        settings = preprocess_settings(config)
        side = settings.size
        # (width, height), while `settings` has one side of a square or (height, width)
        self._size = (side, side) if isinstance(side, int) else (side[1], side[0])
        self._mode = settings.resize_mode
        self._fill = settings.fill_color
        scale = np.array([(255.0,) * 3, settings.mean, settings.std], np.float32)
        self._scale = scale[..., None, None]
        is_square = self._size[0] == self._size[1]
        self._resampling = Image.Resampling.BICUBIC
        # For a target that is not a square, open_clip ignores the filter in this mode.
        ignores_filter = self._mode == "shortest" and not is_square
        if settings.interpolation == "bilinear" and not ignores_filter:
            self._resampling = Image.Resampling.BILINEAR
        self.shape = (3, self._size[1], self._size[0])

    @property
    def scale(self) -> torch.Tensor:
        """The second argument of `normalize`, float32 [3, 3, 1, 1]. The first axis has
        the largest byte value (255), the mean and the standard deviation. The second
        axis has the three channels.
        """
        import torch

        return torch.from_numpy(self._scale)

    def __call__(
        self, image: Image.Image, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Convert an image to a tensor. The result is written to `out`, if it is
        given.
        """
        import torch

        return torch.from_numpy(self.array(image, None if out is None else out.numpy()))

    def array(
        self, image: Image.Image, out: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Convert an image to an array. The result is written to `out`, if it is
        given.
        """
        from edje_index.images.resize import channels

        if out is None:
            out = np.empty(self.shape, np.uint8)
        channels(self.pixels(image).reshape(-1), out.reshape(-1))
        return out

    def resize(self, image: Image.Image) -> Image.Image:
        """Return the image (RGB) as the vision tower reads it: resized and cropped.

        Raises:
            ImageError: the image is too narrow to be resized.
        """
        return Image.fromarray(self.pixels(image)[:, :, :3].copy())

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the same pixels as `resize`, but as an array [height, width, 4]. The
        last byte of a pixel has no meaning.
        """
        # Imported here, because the module loads Numba, which a search for a caption
        # does not need.
        from edje_index.images.resize import resize

        width, height = self._size
        size = self._resized(image)
        if 0 in size:
            raise ImageError(
                "extreme-aspect-ratio",
                f"{image.width} x {image.height} pixels cannot be resized: a side would"
                " have no pixels",
            )
        # Crop to the centre. An axis that is shorter than the target is padded below.
        left = max(0, round((size[0] - width) / 2))
        top = max(0, round((size[1] - height) / 2))
        box = (left, top, min(size[0], left + width), min(size[1], top + height))
        pixels = resize(image, size, box, self._resampling)
        rows, columns = pixels.shape[:2]
        if (columns, rows) == self._size:
            return pixels
        padded = np.full((height, width, 4), self._fill, np.uint8)
        left = (width - columns) // 2
        top = (height - rows) // 2
        padded[top : top + rows, left : left + columns] = pixels
        return padded

    def _resized(self, image: Image.Image) -> tuple[int, int]:
        """Return the (width, height) of `image` before the crop."""
        width, height = self._size
        if self._mode == "squash":
            return self._size
        if self._mode == "shortest" and width == height:
            # As in torchvision, the shorter side becomes `width`.
            longer = int(width * max(image.size) / min(image.size))
            return (width, longer) if image.width < image.height else (longer, width)
        ratios = (image.width / width, image.height / height)
        ratio = max(ratios) if self._mode == "longest" else min(ratios)
        return round(image.width / ratio), round(image.height / ratio)


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
