"""Computes the attention of the m queries of a compressed adapter over the patches of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.info import ENCODER_FILES, BundleInfo, verify_files
from edje_index.images.clips import is_clip
from edje_index.images.decode import DEFAULT_MAX_PIXELS, decode_partial
from edje_index.images.thumbnails import PHOTO_COLUMNS, PHOTO_ERRORS, describe_photo_error, read_photo
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.adapter import COMPRESSED, CompressionAdapter
from edje_index.progress import OnProgress
from storage_formats.format.rows import read_rows


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of m queries over one image.

    Attributes:
        weights: attention weights over the grid of patches, averaged over the heads, float32 [m, rows, columns]. The
            weights of a query sum to 1.
        pixels: the image as the vision tower reads it, uint8 [height, width, 3].
    """

    weights: NDArray[np.float32]
    pixels: NDArray[np.uint8]


@dataclass(frozen=True)
class RowAttention:
    """The attention maps of one row, or the reason why there are none.

    Attributes:
        maps: the attention maps; None if they cannot be computed.
        problem: reason why there are no maps; empty if there are maps.
    """

    maps: AttentionMaps | None
    problem: str = ""


def row_attention(
    root: Path, bundle: BundleInfo, row_ids: Sequence[int], on_progress: OnProgress
) -> list[RowAttention]:
    """Return the attention of each row in `row_ids`. An image that cannot be read raises no error.

    The attention is not stored. The vision tower encodes the images again.

    Args:
        root: directory of the index.
        bundle: bundle that built the index.
        row_ids: rows with tokens.
        on_progress: called with the progress.

    Raises:
        ModelError: a file of the bundle is damaged.
    """
    kind = bundle.adapter["kind"]
    if kind != COMPRESSED:
        problem = f"the adapter is {kind}, and only a {COMPRESSED} adapter has queries over patches"
        return [RowAttention(None, problem)] * len(row_ids)
    verify_files(bundle, ENCODER_FILES)
    encoder = ImageEncoder.of(bundle, device="cpu", dtype="float32")
    made: list[RowAttention] = []
    for row in read_rows(root, row_ids, PHOTO_COLUMNS).to_pylist():
        on_progress("computing attention, images", len(made), len(row_ids))
        made.append(_of_row(encoder, row))
    return made


def _of_row(encoder: ImageEncoder, row: dict[str, Any]) -> RowAttention:
    try:
        data = read_photo(row)
        if is_clip(data):
            return RowAttention(None, "the row is a clip, and attention is shown for images only")
        image = decode_partial(data, DEFAULT_MAX_PIXELS)[0]
        pixels, resized = encoder.preprocess(image), encoder.preprocess.resize(image)
    except PHOTO_ERRORS as error:
        return RowAttention(None, describe_photo_error(error))
    return RowAttention(AttentionMaps(query_attention(encoder, pixels), np.asarray(resized)))


@torch.inference_mode()
def query_attention(encoder: ImageEncoder, pixels: torch.Tensor) -> NDArray[np.float32]:
    """Return the attention weights of the queries over the grid of patches, float32 [m, rows, columns].

    Args:
        encoder: image encoder with a compressed adapter.
        pixels: a result of `ImageEncoder.preprocess`, float32 [3, height, width].
    """
    assert isinstance(encoder.adapter, CompressionAdapter)
    patches, _ = encoder.vision.encode(pixels.unsqueeze(0))
    weights = encoder.adapter.query_attention(patches)[0].float().cpu().numpy()
    height, width = encoder.vision.image_size
    rows = round(math.sqrt(weights.shape[1] * height / width))  # patches are squares
    result: NDArray[np.float32] = weights.reshape(len(weights), rows, -1)
    return result
