"""Which pairs a step uses: a pure function of the seed and the step, so that resuming needs no saved state.

An epoch visits every caption once, in an order of its own, as published. If there are several data sets,
each has a share of the pairs in proportion to its captions. If `epoch_of` is "images", an epoch visits every image
once, with one of its captions, and each caption is used once in as many epochs as the image has captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edje_index.training.data.dataset import TrainingData

# Purposes of random numbers. Each has a stream of its own, seeded by [seed, purpose, ...].
ORDER, NEGATIVE_IMAGES, NEGATIVE_TEXTS, MASKING, DROPOUT, CLUSTERING, VIEWS, VIEW_CHOICE, POOLING, BANK, DEV = range(11)


def stream(seed: int, purpose: int, *position: int) -> np.random.Generator:
    """The random numbers of one purpose at one position in the training."""
    return np.random.default_rng([seed, purpose, *position])


@dataclass(frozen=True)
class Sampler:
    """Batches of `batch_size` pairs. Pairs at the end of an epoch that fill no batch are left out.

    Attributes:
        data: images and captions to draw from.
        batch_size: summed over all workers.
        seed: decides the order.
        epoch_of: what an epoch visits once, "captions" or "images".
    """

    data: TrainingData
    batch_size: int
    seed: int
    epoch_of: str = "captions"

    def pairs(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image numbers and caption numbers, int64 [batch_size] each, of batch `batch` of the whole training."""
        if self.epoch_of == "images":
            images, caption_sets = self.sets(batch, 1)
            return images, caption_sets[0]
        captions, _ = self._members(batch, self.data.pairs("captions"))
        return np.searchsorted(self.data.caption_starts, captions, side="right") - 1, captions

    def sets(self, batch: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of distinct images [batch_size], and `count` sets of one caption per image [count, batch_size]."""
        images, epoch = self._members(batch, self.data.images)
        starts = self.data.caption_starts
        counts = starts[images + 1] - starts[images]
        first = images + epoch  # so that an epoch does not use the first caption of every image
        return images, starts[images] + (first + np.arange(count)[:, None]) % counts

    def _members(self, batch: int, count: int) -> tuple[NDArray[np.int64], int]:
        """Members of a batch among `count`, and the number of its epoch."""
        epoch, batch_of_epoch = divmod(batch, count // self.batch_size)
        order = _permutation(count, self.seed, epoch)
        return order[batch_of_epoch * self.batch_size : (batch_of_epoch + 1) * self.batch_size], epoch


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stream(seed, ORDER, epoch).permutation(count)
