"""What the frozen image tower makes of all pictures, computed once and kept: a pass that resumes where it stopped.

    CACHE/<key>.f32     float32 [images, d], rows in the order of the captions; NaN where a picture cannot be read
    CACHE/<key>.done    number of rows that are on the disk

The key covers the tower's weights, the preprocessing and the list of pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edje_index.clip_model import ClipConfig
from edje_index.images import DEFAULT_MAX_PIXELS, ImageError, decode_rgb
from edje_index.preprocessing import Preprocessor
from storage_formats.atomic import write_bytes_atomic

BATCH = 32
DECODE_THREADS = 4
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class PooledTower:
    """The frozen part of an open_clip timm image tower: from pixels to what its head takes.

    Attributes:
        trunk: the timm model, which pools.
        config: of the whole model.
    """

    trunk: torch.nn.Module
    config: ClipConfig

    def key(self, pictures: Sequence[Path]) -> str:
        """SHA-256 of all that decides the features."""
        digest = hashlib.sha256(json.dumps(self.config.preprocess, sort_keys=True).encode())
        for name, tensor in sorted(self.trunk.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        for picture in pictures:
            digest.update(str(picture).encode(errors="surrogateescape") + b"\0")
        return digest.hexdigest()[:32]


def image_features(
    tower: PooledTower, pictures: Sequence[Path], cache: Path, on_progress: Callable[[int, int], None]
) -> Floats:
    """Features of pictures, float32 [n, d]; rows of those that cannot be read are NaN.

    Args:
        tower: what makes them.
        pictures: paths of image files.
        cache: folder where features are kept; what lies there is not made again.
        on_progress: (pictures done, pictures).
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{tower.key(pictures)}.f32"
    marker = path.with_suffix(".done")
    done = int(marker.read_text()) if marker.exists() and path.exists() else 0
    shape = (len(pictures), int(tower.trunk.num_features))  # type: ignore[arg-type]
    features = np.memmap(path, np.float32, mode="r+" if done else "w+", shape=shape)
    for start, pixels in _batches(tower.config, pictures, done):
        features[start : start + len(pixels)] = _encode(tower.trunk, pixels)
        features.flush()
        write_bytes_atomic(marker, str(start + len(pixels)).encode())
        on_progress(start + len(pixels), len(pictures))
    return np.array(features)


def _batches(
    config: ClipConfig, pictures: Sequence[Path], done: int
) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
    """Decoded ahead of the model by one batch."""
    prepare = Preprocessor(config)
    with ThreadPoolExecutor(DECODE_THREADS) as pool:

        def submit(start: int) -> list[Any]:
            return [pool.submit(_pixels, path, prepare) for path in pictures[start : start + BATCH]]

        coming = submit(done)
        for start in range(done, len(pictures), BATCH):
            current, coming = coming, submit(start + BATCH)
            yield start, [future.result() for future in current]


def _pixels(path: Path, prepare: Preprocessor) -> torch.Tensor | None:
    try:
        return prepare(decode_rgb(path.read_bytes(), DEFAULT_MAX_PIXELS))
    except (ImageError, OSError):
        return None


@torch.inference_mode()
def _encode(trunk: torch.nn.Module, pixels: list[torch.Tensor | None]) -> Floats:
    found = [p for p in pixels if p is not None]
    features = np.full((len(pixels), int(trunk.num_features)), np.nan, np.float32)  # type: ignore[arg-type]
    if found:
        features[[p is not None for p in pixels]] = trunk(torch.stack(found)).numpy()
    return features
