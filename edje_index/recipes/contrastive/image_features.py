"""Computes the features of all images with the frozen image tower, and caches them.

    CACHE/<key>.f32     features of each image, float32 [images, d]; NaN for an unreadable image
    CACHE/<key>.seen    modification time and size of each image file, int64 [images, 2]

The key is a hash of the tower's weights, the preprocessing and the list of images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edje_index.images.decode import DEFAULT_MAX_PIXELS, ImageError, decode_rgb
from edje_index.images.preprocessing import Preprocessor
from edje_index.models.clip_config import ClipConfig
from edje_index.progress import OnProgress

BATCH = 32
DECODE_THREADS = 4
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class PooledTower:
    """The frozen part of the image tower. It maps pixels to the input of the image head.

    Attributes:
        trunk: timm model with pooling.
        config: configuration of the whole open_clip model.
    """

    trunk: torch.nn.Module
    config: ClipConfig

    def key(self, images: Sequence[Path]) -> str:
        """Return the key of the features of ``images``: the first 32 hexadecimal digits of a SHA-256.

        The hash covers the weights of the tower, the preprocessing and the paths of the images.
        """
        digest = hashlib.sha256(json.dumps(self.config.preprocess, sort_keys=True).encode())
        for name, tensor in sorted(self.trunk.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        for image in images:
            digest.update(str(image).encode(errors="surrogateescape") + b"\0")
        return digest.hexdigest()[:32]


def image_features(tower: PooledTower, images: Sequence[Path], cache: Path, on_progress: OnProgress) -> Floats:
    """Return the features of images, float32 [n, d]. The rows of unreadable images are NaN.

    Args:
        tower: frozen image tower.
        images: paths of image files.
        cache: folder that stores the features. Stored features of unchanged files are reused.
        on_progress: called after each batch.
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{tower.key(images)}.f32"
    shape = (len(images), int(tower.trunk.num_features))  # type: ignore[arg-type]
    if not path.exists() or path.stat().st_size != 4 * shape[0] * shape[1]:
        path.with_suffix(".seen").unlink(missing_ok=True)  # its rows are gone
    seen = _mapped(path.with_suffix(".seen"), np.int64, (len(images), 2))
    features = _mapped(path, np.float32, shape)
    stamps = np.array([_stamp(image) for image in images], dtype=np.int64).reshape(-1, 2)
    stale = np.flatnonzero((seen != stamps).any(axis=1))
    for start, pixels in _batches(tower.config, [images[row] for row in stale.tolist()]):
        rows = stale[start : start + len(pixels)]
        features[rows] = _encode(tower.trunk, pixels)
        features.flush()
        seen[rows] = stamps[rows]
        seen.flush()
        on_progress("image features", len(images) - len(stale) + start + len(pixels), len(images))
    result = np.array(features)
    result[(stamps == 0).all(axis=1)] = np.nan
    return result


def _mapped(path: Path, dtype: type[Any], shape: tuple[int, int]) -> np.memmap[Any, Any]:
    """Map the array in the file `path` into memory. A missing file is created with zeros."""
    return np.memmap(path, dtype, mode="r+" if path.exists() else "w+", shape=shape)


def _stamp(path: Path) -> tuple[int, int]:
    """Return (modification time in nanoseconds, size in bytes) of a file; (0, 0) if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _batches(config: ClipConfig, images: Sequence[Path]) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
    """Yield (index of the first image, pixels of each image) per batch. Threads decode the next batch ahead.

    The pixels of an unreadable image are None.
    """
    prepare = Preprocessor(config)
    with ThreadPoolExecutor(DECODE_THREADS) as pool:

        def submit(start: int) -> list[Any]:
            return [pool.submit(_pixels, path, prepare) for path in images[start : start + BATCH]]

        next_batch = submit(0)
        for start in range(0, len(images), BATCH):
            current, next_batch = next_batch, submit(start + BATCH)
            yield start, [future.result() for future in current]


def _pixels(path: Path, prepare: Preprocessor) -> torch.Tensor | None:
    try:
        return prepare(decode_rgb(path.read_bytes(), DEFAULT_MAX_PIXELS))
    except (ImageError, OSError):
        return None


@torch.inference_mode()
def _encode(trunk: torch.nn.Module, pixels: list[torch.Tensor | None]) -> Floats:
    readable = [p for p in pixels if p is not None]
    features = np.full((len(pixels), int(trunk.num_features)), np.nan, np.float32)  # type: ignore[arg-type]
    if readable:
        features[[p is not None for p in pixels]] = trunk(torch.stack(readable)).numpy()
    return features
