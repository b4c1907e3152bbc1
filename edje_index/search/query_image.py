"""Reads the picture of a query and embeds it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps

from edje_index.images.decode import ImageError, decode_rgb
from edje_index.images.inputs import InputRef, display_path, read_bytes
from edje_index.images.preprocessing import Preprocessor
from edje_index.images.to_rgb import to_rgb
from edje_index.indexing.image_encoder import image_tokens
from edje_index.models.bf16 import to_bf16_array
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle

Array = np.ndarray[Any, np.dtype[Any]]


@torch.inference_mode()
def encode_images(model: ModelBundle, images: Sequence[bytes | Image.Image]) -> tuple[Array, Array]:
    """Tokens, bfloat16 [b, m, d], and embeddings, float32 [b, embed_dim], of pictures, as an index would store them.

    Raises:
        UsageError: a picture cannot be read.
    """
    pixels = torch.stack([_pixels(model, image) for image in images])
    tokens, embeddings = image_tokens(model.vision, model.adapter, pixels.to(model.joint.device))
    return to_bf16_array(tokens), embeddings.float().cpu().numpy()


@torch.inference_mode()
def embed_image(model: ModelBundle, image: str | Path | bytes | Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The embedding of a picture, float32 [embed_dim].

    Args:
        model: the bundle whose vision tower is used.
        image: a path, the bytes of an image file, or a PIL image.

    Raises:
        UsageError: the image cannot be read.
    """
    _, embeddings = model.vision.encode(_pixels(model, image)[None].to(model.joint.device))
    embedding: np.ndarray[Any, np.dtype[np.float32]] = embeddings[0].float().cpu().numpy()
    return embedding


def _pixels(model: ModelBundle, image: str | Path | bytes | Image.Image) -> torch.Tensor:
    try:
        return Preprocessor(model.clip_config)(_rgb(image))
    except ImageError as error:
        name = "" if not isinstance(image, (str, Path)) else f" {image}"
        raise UsageError(f"cannot read the query image{name}: {error}", parameter="image") from error


def _rgb(image: str | Path | bytes | Image.Image) -> Image.Image:
    if isinstance(image, (str, Path)):
        path = os.fsencode(image)
        image = read_bytes(InputRef(display_path(path), path))
    if isinstance(image, bytes):
        return decode_rgb(image)
    return to_rgb(ImageOps.exif_transpose(image))
