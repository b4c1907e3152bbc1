"""Provides the patch features of images, which the frozen vision tower computes. They
are either read from an index, or computed in the training steps.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.frames import LOAD, DecodeSettings, decode_input
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.inputs.input_lists import InputTable
from edje_index.inputs.json_lines import read_json_lines
from edje_index.inputs.refs import InputRef, read_bytes
from edje_index.models.devices import as_tensor
from edje_index.training.random_streams import VIEWS, stream
from storage_formats.arrays import Bools, Ints
from storage_formats.errors import CorruptIndexError, EdjeError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.token_store import TokenStore

# images per forward pass of the tower
TOWER_BATCH = 32
Loaded = tuple[Tensor, Bools]
_UNREADABLE = "unreadable-*.jsonl"
# Ranges of a random crop: its area as a fraction of the area of the photo, and its
# width divided by its height.
_AREA = (0.35, 1.0)
_ASPECT = (3 / 4, 4 / 3)


class StoredFeatures:
    """Features that an index stores as blocks. They are read in the highest-fidelity
    precision that the index stores.
    """

    def __init__(self, index: CommittedIndex) -> None:
        self.index = index
        self._store = TokenStore(index)

    def load(self, rows: Ints) -> Loaded:
        """Return the features of the k `rows`, bfloat16 [k, n, d], and which rows could
        be read, bool [k]. The second array contains only True, because a row without
        features is an error.

        Raises:
            CorruptIndexError: a row is a hole.
        """
        blocks = self._store.fetch(rows)
        holes = self._store.holes(blocks)
        if holes.any():
            raise CorruptIndexError(
                f"the index {self.index.root} has no features for row {rows[holes][0]}",
                remedy="verify",
            )
        return as_tensor(blocks), np.ones(len(rows), dtype=bool)

    fetch = load

    def finish(self, values: Tensor) -> Tensor:
        """Return `values` unchanged, because `load` returns features."""
        return values


@dataclass(eq=False)
class OnlineFeatures:
    """Features that the frozen vision tower computes from the images, with the same
    code as an index build.

    An image that could be read when the training run started may become unreadable
    later. Each such image is recorded in one line of the file
    ``unreadable-RANK.jsonl`` in the run folder.

    Args:
        index: index with the rows and embeddings of the images. Its blocks are not
            read.
        inputs: where to read the image of each row.
        encoder: the vision tower of the initial bundle, and an adapter without weights.
        pool: threads that read and decode images.
        views: number of augmented views of each photo. If it is 0, row r is photo r.
            Otherwise, row r is view ``r % views`` of photo ``r // views``.
        seed: seed of the augmented views.
    """

    index: CommittedIndex
    inputs: InputTable
    encoder: ImageEncoder
    run_dir: Path
    rank: int
    pool: ThreadPoolExecutor
    views: int = 0
    seed: int = 0
    _logged: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, rows: Ints) -> Loaded:
        """Return the decoded images of the k `rows`, uint8 [k, 3, h, w], and which
        images could be read, bool [k]. An image that cannot be read is black.
        """
        images, views = np.divmod(rows, max(1, self.views))
        # The threads of the pool write to `pixels`. They are not in inference mode, so
        # `pixels` must not be an inference tensor, even if the calling thread is in
        # inference mode.
        with torch.inference_mode(False):
            size = self.encoder.vision.image_size
            pixels = torch.zeros(len(rows), 3, *size, dtype=torch.uint8)
        readable = self.pool.map(
            self._load_one, self.inputs.refs(images), views.tolist(), pixels
        )
        return pixels, np.fromiter(readable, dtype=bool, count=len(rows))

    def _load_one(self, ref: InputRef, view: int, target: Tensor) -> bool:
        """Write the pixels of one image to `target`. Return False if the image
        cannot be read.
        """
        try:
            data = read_bytes(ref)

            def convert(image: Image.Image) -> Tensor:
                if self.views:
                    image = photo_view(
                        image, data, view, self.encoder.vision.image_size, self.seed
                    )
                return self.encoder.preprocess(image, target)

            decode_input(data, ref.uri, DecodeSettings(truncated=LOAD), convert)
        except ImageError as error:
            line = (
                json.dumps(
                    {"uri": ref.uri, "reason": error.reason, "detail": error.detail}
                )
                + "\n"
            )
            log = self.run_dir / _UNREADABLE.replace("*", str(self.rank))
            with self._lock:
                if ref.uri not in self._logged:
                    self._logged.add(ref.uri)
                    with log.open("a", encoding="utf-8") as file:
                        file.write(line)
            return False
        return True

    @torch.no_grad()
    def finish(self, values: Tensor) -> Tensor:
        """Run the tower on the images `values` [k, 3, h, w]. Return the features,
        bfloat16 [k, n, d].
        """
        return torch.cat(
            [self.encoder.tokens(part) for part in torch.split(values, TOWER_BATCH)]
        )

    def fetch(self, rows: Ints) -> Loaded:
        """Return the features of the k `rows`, bfloat16 [k, n, d] on the CPU, and which
        images could be read, bool [k].

        At most 32 decoded images are in memory at once.

        Raises:
            EdjeError: there are at least 32 `rows`, and none of their images can be
                read.
        """
        features = []
        readable = []
        for start in range(0, len(rows), TOWER_BATCH):
            values, are_readable = self.load(rows[start : start + TOWER_BATCH])
            features.append(self.finish(values).cpu())
            readable.append(are_readable)
        is_readable = np.concatenate(readable)
        if len(rows) >= TOWER_BATCH and not is_readable.any():
            raise nothing_readable()
        return torch.cat(features), is_readable


Features = StoredFeatures | OnlineFeatures
"""Patch features of the images of an index.

The thread that makes batches calls `load`, which uses the CPU. The training step passes
the result of `load` to `finish`, which uses the device. `fetch` does the work of both
methods.
"""


def unreadable_by_reason(run_dir: Path) -> dict[str, int]:
    """Return the number of images that the workers of a training run could not read, by
    reason. Images that could not be read before the run was resumed are counted too.
    With stored features, the result is empty, because no images are read.
    """
    values = [
        value
        for path in sorted(run_dir.glob(_UNREADABLE))
        for _, value, _ in read_json_lines(path)
    ]
    # A killed worker may leave an incomplete line, whose value is None.
    reasons = {value["uri"]: value["reason"] for value in values if value}
    return dict(sorted(Counter(reasons.values()).items()))


def nothing_readable() -> EdjeError:
    """Return the error for a batch without any image that can be read."""
    return EdjeError(
        "none of the images of a batch can be read any more; restore the image files,"
        " and train again to resume. The files unreadable-*.jsonl in the run folder"
        " name the images"
    )


def photo_view(
    photo: Image.Image, data: bytes, view: int, size: tuple[int, int], seed: int
) -> Image.Image:
    """Return augmented view number `view` of `photo`, which was decoded from the
    file contents `data`.
    """
    # The random numbers depend on the content of the file instead of its path, so that
    # a photo that is moved keeps its views.
    content = int(content_hash(data)[:32], 16)
    return random_view(photo, size, stream(seed, VIEWS, content, view))


def random_view(
    photo: Image.Image, size: tuple[int, int], rng: np.random.Generator
) -> Image.Image:
    """Return a random crop of `photo`, resized to `size` (height, width), mirrored with
    probability 1/2.

    The method is that of Szegedy et al. (2015). The crop has 35 % to 100 % of the area
    of the photo (8 % to 100 % in the paper), and its width is 3/4 to 4/3 of its height.
    A crop that would exceed the width or the height of the photo is cut.
    """
    area = rng.uniform(*_AREA)
    aspect = np.exp(rng.uniform(*np.log(_ASPECT)))
    pixels = photo.width * photo.height * area
    width = min(photo.width, (pixels * aspect) ** 0.5)
    height = min(photo.height, (pixels / aspect) ** 0.5)
    left = rng.uniform(0, photo.width - width)
    top = rng.uniform(0, photo.height - height)
    view = photo.resize(
        size[::-1],
        Image.Resampling.BICUBIC,
        box=(left, top, left + width, top + height),
    )
    return (
        view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view
    )
