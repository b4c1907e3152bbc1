"""Which pairs a step uses: a pure function of the seed and the step, so that resuming needs no saved state.

An epoch uses every image once, with one of its captions. Over as many epochs as an image has captions, each caption is
used once.
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
    """Batches of `batch_size` distinct images. Images at the end of an epoch that fill no batch are left out.

    Attributes:
        data: images and captions to draw from.
        batch_size: summed over all workers.
        seed: decides the order.
    """

    data: TrainingData
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches in an epoch."""
        return self.data.images // self.batch_size

    def pairs(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image numbers and caption numbers, int64 [batch_size] each, of batch `batch` of the whole training."""
        images, captions = self.sets(batch, 1)
        return images, captions[0]

    def sets(self, batch: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image numbers [batch_size] of a batch, and `count` sets of one caption per image [count, batch_size]."""
        epoch, batch_of_epoch = divmod(batch, self.batches_per_epoch)
        order = _permutation(self.data.images, self.seed, epoch)
        images = order[batch_of_epoch * self.batch_size : (batch_of_epoch + 1) * self.batch_size]
        starts = self.data.caption_starts
        counts = starts[images + 1] - starts[images]
        first = images + epoch  # so that an epoch does not use the first caption of every image
        return images, starts[images] + (first + np.arange(count)[:, None]) % counts


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stream(seed, ORDER, epoch).permutation(count)
