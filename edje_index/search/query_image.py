"""Reads and encodes query images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps

from edje_index.images.decode import ImageError, decode_rgb
from edje_index.images.inputs import InputRef, display_path, read_bytes
from edje_index.images.to_rgb import to_rgb
from storage_formats.arguments import as_path, shown
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.indexing.image_encoder import ImageEncoder

Array = np.ndarray[Any, np.dtype[Any]]
QueryImage: TypeAlias = "str | Path | bytes | Image.Image"
"""An image: a path of an image file, the bytes of an image file, or a PIL image."""


def encode_images(encoder: ImageEncoder, images: Sequence[QueryImage]) -> tuple[Array, Array]:
    """Encode query images in the same way as a build.

    Returns:
        (tokens, bfloat16 [b, m, d]; embeddings, float32 [b, embed_dim]).

    Raises:
        UsageError: an image cannot be read.
    """
    return encoder.encode(torch.stack([_pixels(encoder, image) for image in images]))


def _pixels(encoder: ImageEncoder, image: QueryImage) -> torch.Tensor:
    """Return the pixels that the vision tower reads."""
    name = f" {image}" if isinstance(image, (str, Path)) else ""
    try:
        if isinstance(image, (str, Path)):
            path = os.fsencode(as_path(image, "image"))
            image = read_bytes(InputRef(display_path(path), path))
        if isinstance(image, bytes):
            return encoder.preprocess(decode_rgb(image))
        if not isinstance(image, Image.Image) or not all(image.size):
            raise UsageError(
                "image must be a path, the bytes of an image file, or a PIL image with pixels, got "
                f"{shown(image)}; convert an array of pixels with PIL.Image.fromarray",
                parameter="image",
            )
        try:
            rgb = to_rgb(ImageOps.exif_transpose(image))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow reads the pixels of an opened file only now
            raise ImageError(reason="corrupt", detail=str(error)) from error
        return encoder.preprocess(rgb)
    except ImageError as error:
        message = f"cannot read the query image{name}: {error}; give another image"
        raise UsageError(message, parameter="image") from error
