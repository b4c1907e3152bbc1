"""What the frozen image tower makes of all pictures, computed once and kept: a pass that resumes where it stopped.

    CACHE/<key>.f32     float32 [images, d], rows in the order of the captions; NaN where a picture cannot be read
    CACHE/<key>.seen    int64 [images, 2], time and size of each file when its row was made

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

from edje_index.images.decode import DEFAULT_MAX_PIXELS, ImageError, decode_rgb
from edje_index.images.preprocessing import Preprocessor
from edje_index.models.clip_model import ClipConfig

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
        cache: folder where features are kept; of a file that is as it was they are not made again.
        on_progress: (pictures done, pictures).
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{tower.key(pictures)}.f32"
    shape = (len(pictures), int(tower.trunk.num_features))  # type: ignore[arg-type]
    if not path.exists() or path.stat().st_size != 4 * shape[0] * shape[1]:
        path.with_suffix(".seen").unlink(missing_ok=True)  # it would vouch for rows that are gone
    seen = _mapped(path.with_suffix(".seen"), np.int64, (len(pictures), 2))
    features = _mapped(path, np.float32, shape)
    stamps = np.array([_stamp(picture) for picture in pictures], dtype=np.int64).reshape(-1, 2)
    left = np.flatnonzero((seen != stamps).any(axis=1))
    for start, pixels in _batches(tower.config, [pictures[at] for at in left.tolist()]):
        rows = left[start : start + len(pixels)]
        features[rows] = _encode(tower.trunk, pixels)
        features.flush()
        seen[rows] = stamps[rows]
        seen.flush()
        on_progress(len(pictures) - len(left) + start + len(pixels), len(pictures))
    found = np.array(features)
    found[(stamps == 0).all(axis=1)] = np.nan
    return found


def _mapped(path: Path, dtype: type[Any], shape: tuple[int, int]) -> np.memmap[Any, Any]:
    """The array that `path` holds, or a new one of zeros."""
    return np.memmap(path, dtype, mode="r+" if path.exists() else "w+", shape=shape)


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file does (nanoseconds, bytes); of one that is not there as of one never seen: (0, 0)."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def _batches(config: ClipConfig, pictures: Sequence[Path]) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
    """Decoded ahead of the model by one batch."""
    prepare = Preprocessor(config)
    with ThreadPoolExecutor(DECODE_THREADS) as pool:

        def submit(start: int) -> list[Any]:
            return [pool.submit(_pixels, path, prepare) for path in pictures[start : start + BATCH]]

        coming = submit(0)
        for start in range(0, len(pictures), BATCH):
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
