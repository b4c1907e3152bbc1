"""The image encoder of an indexing worker: converts images and clips to tokens and
embeddings.

Equal bundle, device type, dtype, number of threads and batch size give equal bits in
every process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edje_index.bundles.bundle import load_adapter, load_visual
from edje_index.bundles.info import (
    ENCODER_FILES,
    BundleInfo,
    read_bundle_info,
    verify_files,
)
from edje_index.errors import ModelError
from edje_index.images.preprocessing import Preprocessor
from edje_index.models.adapter import COMPRESSED, Adapter
from edje_index.models.devices import (
    autocast,
    resolve_device,
    resolve_dtype,
    to_bf16_array,
)
from edje_index.models.linear import replace_linear_layers
from edje_index.models.vision_tower import VisionTower
from storage_formats.arguments import repr_of

Array = np.ndarray[Any, np.dtype[Any]]

# b clips, f frames, 3 channels, height, width
_CLIP_AXES = 5


class ImageEncoder:
    """Encodes images with the vision tower and the adapter of a bundle.

    Attributes:
        info: description of the bundle.
        device: device of the weights.
        dtype: dtype of the matrix products. The weights are float32.
        preprocess: thread-safe function that converts a PIL image (RGB) to float32 [3,
            height, width], bit for bit as the evaluation transform of open_clip.

    Examples:
        >>> import torch
        >>> from PIL import Image
        >>> from edje_index import ImageEncoder
        >>> encoder = ImageEncoder.open("model", device="cpu")
        >>> pixels = encoder.preprocess(Image.open("photos/0.jpg").convert("RGB"))
        >>> tokens, embeddings = encoder.encode(torch.stack([pixels]))
        >>> tokens.shape, embeddings.shape
        ((1, 4, 16), (1, 24))
    """

    def __init__(
        self,
        info: BundleInfo,
        vision: VisionTower,
        adapter: Adapter,
        preprocess: Preprocessor,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.info = info
        self.vision = vision
        self.adapter = adapter
        self.preprocess = preprocess
        self.device = next(vision.parameters()).device
        self.dtype = dtype

    @classmethod
    def open(
        cls,
        bundle_path: str | Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        dtype: str = "auto",
    ) -> ImageEncoder:
        """Load the vision tower and the adapter of a bundle, and verify their files.

        Args:
            bundle_path: directory of the bundle.
            device: "auto" (CUDA if available), "cpu", "cuda" or "cuda:N".
            threads: number of torch CPU threads in this process; None leaves the number
                unchanged.
            dtype: "auto" (bfloat16 on CUDA, float32 on a CPU), "float32" or "bfloat16".

        Raises:
            ModelError: the bundle is damaged, or the device or dtype is not available.
        """
        info = read_bundle_info(bundle_path)
        verify_files(info, ENCODER_FILES)
        if threads is not None:
            torch.set_num_threads(threads)
        return cls.of(info, device=device, dtype=dtype)

    @classmethod
    def of(
        cls, info: BundleInfo, *, device: str = "auto", dtype: str = "auto"
    ) -> ImageEncoder:
        """Load the vision tower and the adapter of a bundle whose files are already
        verified.

        Args:
            info: description of the bundle.
            device: as for `open`.
            dtype: as for `open`.
        """
        target = resolve_device(device)
        vision, config = load_visual(info)
        adapter = load_adapter(info).to(target)
        encoder = cls(
            info,
            vision.to(target),
            adapter,
            Preprocessor(config),
            resolve_dtype(dtype, target),
        )
        if target.type == "cpu":
            replace_linear_layers(encoder.vision, encoder.dtype)
        return encoder

    __repr__ = repr_of("info.path", "block_shape", "dtype", "device")

    @property
    def block_shape(self) -> tuple[int, int]:
        """Shape (m, d) of a block: tokens per block, values per token."""
        return self.info.block_shape

    @property
    def embed_dim(self) -> int:
        """Width of an embedding."""
        return self.vision.embed_dim

    def encode(self, pixels: torch.Tensor) -> tuple[Array, Array]:
        """Encode a batch of images.

        Args:
            pixels: results of `preprocess`, float32 [b, 3, height, width]. For clips,
                [b, f, 3, height, width].

        Returns:
            (tokens, ml_dtypes.bfloat16 [b, m, d], rounded to nearest even;
            embeddings, unit vectors, float32 [b, embed_dim]).
        """
        with torch.inference_mode(), autocast(self.dtype, self.device):
            tokens, embeddings = image_tokens(
                self.vision, self.adapter, self._on_device(pixels)
            )
            return to_bf16_array(tokens), embeddings.float().cpu().numpy()

    def tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the tokens of `pixels`, bfloat16 [b, m, d]. The tokens stay on the
        device of the weights.
        """
        with torch.no_grad(), autocast(self.dtype, self.device):
            return image_tokens(self.vision, self.adapter, self._on_device(pixels))[
                0
            ].bfloat16()

    def _on_device(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda" or pixels.device.type == "cuda":
            return pixels
        return pixels.pin_memory().to(self.device, non_blocking=True)


def image_tokens(
    vision: VisionTower, adapter: Adapter, pixels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [b, m, d] and the embeddings, unit vectors [b, e], of images or
    clips.

    The patches of all frames of a clip are encoded as if they were the patches of one
    image. The embedding of a clip is the mean over the frames.

    Raises:
        ModelError: `pixels` are clips, and the adapter is not ``compressed``.
    """
    if pixels.ndim == _CLIP_AXES:
        if adapter.config.kind != COMPRESSED:
            raise ModelError(
                f"a {adapter.config.kind} adapter cannot combine the frames of clips:"
                f" use a bundle with a {COMPRESSED} adapter"
            )
        patches, embeddings = vision.encode(pixels.flatten(0, 1))
        patches, embeddings = (
            values.view(*pixels.shape[:2], *values.shape[1:])
            for values in (patches, embeddings)
        )
        return adapter(patches.flatten(1, 2)), functional.normalize(
            embeddings.mean(dim=1), dim=-1
        )
    if adapter.needs_attention:
        patches, embeddings, received = vision.encode_with_attention(pixels)
        return adapter(patches, received), embeddings
    patches, embeddings = vision.encode(pixels)
    return adapter(patches), embeddings
