"""Chooses the pairs of a batch. The choice depends only on the seed and the batch number.

By default, an epoch visits every caption once, in a new random order. If `epoch_of` is "images", an epoch visits every
image once, with one caption per image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edje_index.training.data.dataset import TrainingData

# Purposes of random numbers. Each purpose has its own stream, seeded by [seed, purpose, ...].
ORDER, NEGATIVE_IMAGES, NEGATIVE_TEXTS, MASKING, DROPOUT, CLUSTERING, VIEWS, VIEW_CHOICE, POOLING, BANK, DEV = range(11)


def stream(seed: int, purpose: int, *position: int) -> np.random.Generator:
    """Return a random number generator that depends only on the arguments.

    `purpose` is a constant of this module, such as `MASKING`. `position` is, for example, a batch number and a rank.
    """
    return np.random.default_rng([seed, purpose, *position])


@dataclass(frozen=True)
class Sampler:
    """Draws batches of `batch_size` pairs. If the last batch of an epoch is incomplete, it is left out.

    Attributes:
        data: images and captions to draw from.
        batch_size: pairs per batch, summed over all workers.
        seed: seed of the random order.
        epoch_of: "captions" if an epoch visits every caption once, "images" if an epoch visits every image once.
    """

    data: TrainingData
    batch_size: int
    seed: int
    epoch_of: str = "captions"

    def pairs(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the image numbers and the caption numbers of one batch, int64 [batch_size] each.

        `batch` is the batch number, counted from 0 over all epochs.
        """
        if self.epoch_of == "images":
            images, caption_sets = self.sets(batch, 1)
            return images, caption_sets[0]
        captions, _ = self._members(batch, self.data.pairs("captions"))
        return np.searchsorted(self.data.caption_starts, captions, side="right") - 1, captions

    def sets(self, batch: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw distinct images and `count` captions per image for the batch number `batch`.

        Returns:
            Image numbers, int64 [batch_size], and caption numbers, int64 [count, batch_size].
        """
        images, epoch = self._members(batch, self.data.images)
        starts = self.data.caption_starts
        counts = starts[images + 1] - starts[images]
        first = images + epoch  # so that an epoch does not use the first caption of every image
        return images, starts[images] + (first + np.arange(count)[:, None]) % counts

    def _members(self, batch: int, count: int) -> tuple[NDArray[np.int64], int]:
        """Draw a batch from `count` captions or images.

        Return their numbers, int64 [batch_size], and the epoch number.
        """
        epoch, batch_of_epoch = divmod(batch, count // self.batch_size)
        order = _permutation(count, self.seed, epoch)
        return order[batch_of_epoch * self.batch_size : (batch_of_epoch + 1) * self.batch_size], epoch


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stream(seed, ORDER, epoch).permutation(count)
