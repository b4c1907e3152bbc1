"""The image encoder of an indexing worker: converts images and clips to tokens and
embeddings.

On a CPU, the bits of a result depend on the bundle, the dtype, the number of threads,
the batch size and the other images of the batch. On a GPU, batches are always full, so
the other images do not change the bits. But the bits depend on the model of the GPU and
on the version of torch.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edje_index.bundles.bundle import load_adapter, load_visual
from edje_index.bundles.info import (
    ENCODER_FILES,
    VISION_FOLDER,
    BundleInfo,
    read_bundle_info,
    verify_files,
)
from edje_index.errors import ModelError
from edje_index.images.preprocessing import Preprocessor, normalize
from edje_index.models.adapter import COMPRESSED, Adapter
from edje_index.models.clip_config import read_clip_config
from edje_index.models.cuda_graph import CudaGraphs
from edje_index.models.devices import (
    autocast,
    inference,
    plain_torch,
    resolve_device,
    resolve_dtype,
    to_bf16_array,
)
from edje_index.models.linear import replace_linear_layers
from edje_index.models.vision_tower import VisionTower
from storage_formats.arguments import repr_of

Array = np.ndarray[Any, np.dtype[Any]]

# number of axes of a batch of clips: clips, frames, channels, height and width
_CLIP_AXES = 5


class ImageEncoder:
    """Encodes images with the vision tower and the adapter of a bundle.

    Attributes:
        info: description of the bundle.
        device: device of the weights.
        dtype: dtype of the matrix products. On a GPU, `open` also converts the weights
            to this dtype, and all other operations compute in it. On a CPU, the weights
            and all other operations are float32.
        preprocess: thread-safe function that converts a PIL image (RGB) to pixels,
            uint8 [3, height, width]. `normalize` converts these pixels to float32. The
            result equals that of open_clip's evaluation transform bit for bit.
        fills_batches: whether a batch is encoded as a whole even if some of its images
            are missing. True on a GPU, whose kernels, and so the bits of a result,
            depend on the size of the batch.

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
        self._weights = next(vision.parameters()).dtype
        self.fills_batches = self.device.type == "cuda"
        self._scale = preprocess.scale.to(self.device)
        self._frame = preprocess.shape
        # Only one thread at a time launches its batch on the GPU. While this thread
        # then waits for the result, the next thread launches its batch. If both threads
        # launched at the same time, both would also wait at the same time, and the GPU
        # would then have nothing to do.
        self._launching = threading.Lock()
        # on a GPU, all batches have the same shape, so one CUDA graph serves all
        self._graphs = CudaGraphs(self._run, self.device)

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
    @plain_torch()
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
        products = resolve_dtype(dtype, target)
        if target.type == "cpu":
            replace_linear_layers(vision, products)
        else:
            # With bfloat16 weights, an H100 is 1.4 times as fast as with float32
            # weights and autocast (ViT-L/16 at 384 pixels, batches of 128). Compared
            # with float32, the error of a token is 0.014 instead of 0.012
            # (DINOv2-small).
            vision.to(target, products)
            adapter.to(products)
        return cls(info, vision, adapter, Preprocessor(config), products)

    __repr__ = repr_of("info.path", "block_shape", "dtype", "device")

    @property
    def block_shape(self) -> tuple[int, int]:
        """Shape (m, d) of a block: tokens per block, values per token."""
        return self.info.block_shape

    @property
    def embed_dim(self) -> int:
        """Width of an embedding."""
        return self.vision.embed_dim

    def processor(self, batch_size: int) -> str | None:
        """Return a description of what the bits of a result depend on apart from the
        settings: the GPU, the version of torch and `batch_size`. Return None for a CPU.
        """
        if self.device.type != "cuda":
            return None
        gpu = torch.cuda.get_device_properties(self.device)
        return (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, torch"
            f" {torch.__version__}, batches of {batch_size}"
        )

    @plain_torch()
    def new_batch(self, size: int, frames: int | None = None) -> torch.Tensor:
        """Return memory for `size` results of `preprocess`, uint8 [size, 3, height,
        width], or for `size` clips of `frames` frames, [size, frames, 3, height,
        width].

        For a GPU, the memory is pinned, so it can be copied to the GPU while this
        process continues.
        """
        frame_axis = () if frames is None else (frames,)
        return torch.empty(
            (size, *frame_axis, *self._frame),
            dtype=torch.uint8,
            pin_memory=self.device.type == "cuda",
        )

    def pin(self, pixels: Array) -> None:
        """Pin memory, if the device is a GPU, so that it can be copied to the GPU while
        this process continues.
        """
        if self.device.type == "cuda":
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostRegister(pixels.ctypes.data, pixels.nbytes, 0)

    def unpin(self, pixels: Array) -> None:
        """Undo `pin`."""
        if self.device.type == "cuda":
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(pixels.ctypes.data)

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Copy pixels to the device of the weights, and normalise them.

        Args:
            pixels: results of `preprocess`, uint8 [..., 3, height, width]. Float32
                pixels are taken as already normalised, and are only copied.
        """
        pixels = pixels.to(self.device, non_blocking=True)
        if pixels.is_floating_point():
            return pixels
        return normalize(pixels, self._scale)

    def encode(self, pixels: torch.Tensor) -> tuple[Array, Array]:
        """Encode a batch of images. Thread-safe.

        Args:
            pixels: as for `normalize`, [b, 3, height, width]. For clips, [b, f, 3,
                height, width].

        Returns:
            (tokens, ml_dtypes.bfloat16 [b, m, d], rounded to nearest even;
            embeddings, unit vectors, float32 [b, embed_dim]).
        """
        with self._launching, inference():
            tokens, embeddings = self._graphs(pixels)
            # If the tensors are on a GPU, these copies go to pinned memory and do not
            # wait for the GPU.
            tokens = tokens.bfloat16().to("cpu", non_blocking=True)
            embeddings = embeddings.float().to("cpu", non_blocking=True)
            if self.device.type == "cuda":
                end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                end.record(torch.cuda.current_stream(self.device))
        if self.device.type == "cuda":
            end.synchronize()
        return to_bf16_array(tokens), embeddings.numpy()

    def tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the tokens of `pixels`, bfloat16 [b, m, d]. The tokens stay on the
        device of the weights.
        """
        with plain_torch(), torch.no_grad():
            return self._run(pixels)[0].bfloat16()

    def _run(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # if the weights have the dtype of the products, no autocast is needed
        dtype = torch.float32 if self._weights == self.dtype else self.dtype
        with autocast(dtype, self.device):
            normalized = self.normalize(pixels).to(self._weights)
            return image_tokens(self.vision, self.adapter, normalized)


def read_preprocessor(info: BundleInfo) -> Preprocessor:
    """Return the `preprocess` of the encoder of a bundle, without loading the
    encoder.
    """
    folder = info.path / VISION_FOLDER
    return Preprocessor(read_clip_config(folder, info.vision_name))


def image_tokens(
    vision: VisionTower, adapter: Adapter, pixels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [b, m, d] and the embeddings, unit vectors [b, e], of images or
    clips.

    The adapter compresses the patches of all frames of a clip as if they were the
    patches of one image. The embedding of a clip is the mean over the frames,
    normalised to length 1.

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
