"""Reads the picture of a query and embeds it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps

from edje_index.images.decode import ImageError, decode_rgb
from edje_index.images.inputs import InputRef, display_path, read_bytes
from edje_index.images.preprocessing import Preprocessor
from edje_index.images.to_rgb import to_rgb
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle


@torch.inference_mode()
def embed_image(model: ModelBundle, image: str | Path | bytes | Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The embedding of a picture, float32 [embed_dim].

    Args:
        model: the bundle whose vision tower is used.
        image: a path, the bytes of an image file, or a PIL image.

    Raises:
        UsageError: the image cannot be read.
    """
    try:
        pixels = Preprocessor(model.clip_config)(_rgb(image))
    except ImageError as error:
        name = "" if not isinstance(image, (str, Path)) else f" {image}"
        raise UsageError(f"cannot read the query image{name}: {error}", parameter="image") from error
    _, embeddings = model.vision.encode(pixels[None].to(model.joint.device))
    embedding: np.ndarray[Any, np.dtype[np.float32]] = embeddings[0].float().cpu().numpy()
    return embedding


def _rgb(image: str | Path | bytes | Image.Image) -> Image.Image:
    if isinstance(image, (str, Path)):
        path = os.fsencode(image)
        image = read_bytes(InputRef(display_path(path), path))
    if isinstance(image, bytes):
        return decode_rgb(image)
    return to_rgb(ImageOps.exif_transpose(image))
