"""Training data other than features: captions as token ids and embeddings, and the row of each image.

The data are saved as NumPy arrays. Every worker memory-maps these arrays.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.atomic import fsync_paths


@dataclass(frozen=True)
class TrainingData:
    """n images and all their c captions. The captions of an image are adjacent.

    Attributes:
        rows: row of each image in the feature index, int64 [n].
        caption_starts: offsets of the captions of each image, int64 [n + 1]. Image i has the captions
            ``caption_starts[i]:caption_starts[i + 1]``.
        token_starts: offsets of the tokens of each caption, int64 [c + 1]. Caption i has the tokens
            ``tokens[token_starts[i]:token_starts[i + 1]]``.
        tokens: token ids of all captions in order, without special tokens, int32. Captions longer than 64 tokens,
            including special tokens, are truncated.
        caption_keys: a number per caption, int64 [c]. Captions with the same words have the same number.
        text_embeddings: embeddings of the captions by the text tower, float32 [c, e].
        image_mining: embeddings of the images by the mining model, float32 [n, e'].
        text_mining: embeddings of the captions by the mining model, float32 [c, e'].
    """

    rows: NDArray[np.int64]
    caption_starts: NDArray[np.int64]
    token_starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    caption_keys: NDArray[np.int64]
    text_embeddings: NDArray[np.float32]
    image_mining: NDArray[np.float32]
    text_mining: NDArray[np.float32]

    @classmethod
    def open(cls, folder: Path) -> TrainingData:
        """Memory-map the arrays of `folder`."""
        return cls(**{f.name: np.load(folder / f"{f.name}.npy", mmap_mode="r") for f in fields(cls)})

    def save(self, folder: Path) -> None:
        """Write one file per array to the new directory `folder`. If writing fails, `folder` does not exist."""
        staging = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for leaf in fields(self):
            np.save(staging / f"{leaf.name}.npy", getattr(self, leaf.name))
        fsync_paths([*staging.iterdir(), staging])
        staging.rename(folder)
        fsync_paths([folder.parent])

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.rows)

    def pairs(self, epoch_of: str) -> int:
        """Return the number of pairs per epoch.

        `epoch_of` is "captions" if an epoch visits every caption once, and "images" if an epoch visits every image
        once.
        """
        return self.images if epoch_of == "images" else len(self.caption_keys)

    def caption(self, number: int) -> NDArray[np.int32]:
        """Return the token ids of caption `number`."""
        part: NDArray[np.int32] = self.tokens[self.token_starts[number] : self.token_starts[number + 1]]
        return part


@dataclass(frozen=True)
class CaptionSet:
    """n images and their captions.

    Attributes:
        rows: row of each image in the feature index, int64 [n].
        captions: captions of each image, at least one caption per image.
    """

    rows: NDArray[np.int64]
    captions: Sequence[Sequence[str]]

    def pairs(self, epoch_of: str) -> int:
        """Return the number of pairs per epoch.

        `epoch_of` is "captions" if an epoch visits every caption once, and "images" if an epoch visits every image
        once.
        """
        return len(self.rows) if epoch_of == "images" else sum(map(len, self.captions))

    def texts(self) -> list[str]:
        """Return all captions in one list, image by image."""
        return [text for group in self.captions for text in group]


@dataclass(frozen=True)
class DevCaptions:
    """Images and captions for measuring recall and for fitting the weights of the final score. They are not trained on.

    Attributes:
        captions: n images and their captions.
        image_embeddings: embeddings of the images, float32 [n, e].
    """

    captions: CaptionSet
    image_embeddings: NDArray[np.float32]
