"""Online features: workers decode the images of a batch, and the frozen vision tower runs in the training step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from edje_index.bundles.bundle import ModelBundle
from edje_index.images.decode import ImageError
from edje_index.images.decoded_input import DecodeSettings, decode_input
from edje_index.images.input_table import InputTable
from edje_index.images.inputs import InputRef, read_bytes
from edje_index.images.preprocessing import Preprocessor
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.adapter import build_adapter
from edje_index.models.devices import resolve_dtype
from edje_index.training.data.crops import Crops
from edje_index.training.data.features import Features, Loaded
from edje_index.training.data.unreadable import UnreadableImages, nothing_readable
from storage_formats.format.manifest import CommittedIndex

TOWER_BATCH = 32  # images per forward pass of the tower, as in a build


def frozen_encoder(start: ModelBundle, device: torch.device, dtype: str) -> ImageEncoder:
    """Return an encoder that computes the features that the adapter of `start` reads.

    The encoder has the vision tower of `start` and an adapter without weights.
    """
    assert start.info is not None
    vision = start.vision.to(device)
    adapter = build_adapter(start.adapter.config.features(vision.num_patches)).to(device)
    return ImageEncoder(start.info, vision, adapter, Preprocessor(start.clip_config), resolve_dtype(dtype, device))


@dataclass(frozen=True)
class ImageLoader:
    """Reads, decodes and preprocesses images in threads, with the same code as an index build.

    Attributes:
        inputs: table with the image of each row.
        encoder: provides the preprocessing.
        decoding: settings of decoding.
        unreadable: record of the images that cannot be read.
        pool: threads that read and decode.
    """

    inputs: InputTable
    encoder: ImageEncoder
    decoding: DecodeSettings
    unreadable: UnreadableImages
    pool: ThreadPoolExecutor

    def load(self, rows: NDArray[np.int64], crops: Crops | None, views: NDArray[np.int64]) -> Loaded:
        """Load the pixels of the k images `rows`, float32 [k, 3, h, w].

        If `crops` is given, load a view of each image. `views` contains the numbers of these views. An image that
        cannot be read is blank.
        """
        height, width = self.encoder.vision.image_size
        with torch.inference_mode(False):  # the threads write to the tensor, and are never in inference mode
            pixels = torch.zeros(len(rows), 3, height, width)
        readable = self.pool.map(
            lambda ref, view, target: self._load_one(ref, crops, view, target),
            self.inputs.refs(rows),
            views.tolist(),
            pixels,
        )
        return Loaded(pixels, np.fromiter(readable, dtype=bool, count=len(rows)))

    def _load_one(self, ref: InputRef, crops: Crops | None, view: int, target: torch.Tensor) -> bool:
        """Write the pixels of one image to `target`. Return False if the image cannot be read."""
        try:
            data = read_bytes(ref)

            def convert(image: Image.Image) -> torch.Tensor:
                return self.encoder.preprocess(image if crops is None else crops.view(image, data, view))

            target.copy_(decode_input(data, ref.uri, self.decoding, convert).pixels)
        except ImageError as error:
            self.unreadable.add(ref.uri, error)
            return False
        return True


class OnlineFeatures(Features):
    """Features that the frozen vision tower computes from the images when they are needed.

    Args:
        index: index with the rows and embeddings of the images. Its blocks are not read.
        images: loads the images of the rows.
        encoder: result of `frozen_encoder`.
        crops: views to make of every photo; None to use the photos. With v views per photo, row r is view r % v of
            photo r // v.
        compile: whether to use torch.compile for the tower.
    """

    def __init__(
        self,
        index: CommittedIndex,
        images: ImageLoader,
        encoder: ImageEncoder,
        crops: Crops | None = None,
        *,
        compile: bool = False,
    ) -> None:
        super().__init__(index)
        self._images = images
        self._crops = crops
        self._tower = torch.compile(encoder.tokens, dynamic=True) if compile else encoder.tokens

    def unreadable(self) -> int:
        """Return the number of images that the workers of the training run could not read so far."""
        return self._images.unreadable.count()

    def load(self, rows: NDArray[np.int64]) -> Loaded:
        """Read and decode the images of the k `rows`, float32 [k, 3, h, w]. An image that cannot be read is blank."""
        images, views = np.divmod(rows, 1 if self._crops is None else self._crops.views)
        return self._images.load(images, self._crops, views)

    @torch.no_grad()
    def finish(self, values: torch.Tensor) -> torch.Tensor:
        """Run the tower on the images `values` [k, 3, h, w]. Return the features, bfloat16 [k, n, d]."""
        return torch.cat([self._tower(part) for part in torch.split(values, TOWER_BATCH)])

    def fetch(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return the features of the k `rows`, bfloat16 [k, n, d] on the CPU. An image that cannot be read is blank.

        Raises:
            EdjeError: there are at least 32 `rows`, and none of their images can be read.
        """
        return self._fetch(rows)[0]

    def fetch_readable(self, rows: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Compute the features of the rows whose images can be read.

        Returns:
            Features of the j readable rows, bfloat16 [j, n, d], and which of the k `rows` are readable, bool [k].

        Raises:
            EdjeError: there are at least 32 `rows`, and none of their images can be read.
        """
        features, readable = self._fetch(rows)
        return features[torch.from_numpy(readable)], readable

    def _fetch(self, rows: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Return the features of all `rows`, and which rows are readable. Only a few images are in memory at once."""
        features, readable = [], []
        for start in range(0, len(rows), TOWER_BATCH):
            loaded = self.load(rows[start : start + TOWER_BATCH])
            features.append(self.finish(loaded.values).cpu())
            readable.append(loaded.readable)
        if len(rows) >= TOWER_BATCH and not any(part.any() for part in readable):
            raise nothing_readable()
        return torch.cat(features), np.concatenate(readable)
