"""Which pairs a step sees: a pure function of the seed and the step, so that resuming needs no saved state.

An epoch passes over every image once, each with one of its captions; over as many epochs as an image has captions,
each of them comes once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edje_index.training.data.dataset import TrainingData

# One stream of random numbers a purpose; each is seeded by [seed, purpose, ...].
ORDER, NEGATIVE_IMAGES, NEGATIVE_TEXTS, MASKING, DROPOUT, CLUSTERING, VIEWS, SEEN_VIEWS, POOLING, BANK, DEV = range(11)


def stream(seed: int, purpose: int, *place: int) -> np.random.Generator:
    """The random numbers of one purpose at one place."""
    return np.random.default_rng([seed, purpose, *place])


@dataclass(frozen=True)
class Sampler:
    """Batches of `batch_size` distinct images; the rest of an epoch that fills no batch is left out.

    Attributes:
        data: what is drawn from.
        batch_size: over all workers.
        seed: decides the order.
    """

    data: TrainingData
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches of an epoch."""
        return self.data.images // self.batch_size

    def pairs(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image numbers and caption numbers, int64 [batch_size] each, of batch `batch` of the whole training."""
        images, captions = self.sets(batch, 1)
        return images, captions[0]

    def sets(self, batch: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image numbers [batch_size] of a batch, and `count` sets of a caption of each [count, batch_size]."""
        epoch, place = divmod(batch, self.batches_per_epoch)
        order = _permutation(self.data.images, self.seed, epoch)
        images = order[place * self.batch_size : (place + 1) * self.batch_size]
        starts = self.data.caption_starts
        counts = starts[images + 1] - starts[images]
        turn = images + epoch  # not every image with its first caption at once
        return images, starts[images] + (turn + np.arange(count)[:, None]) % counts


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stream(seed, ORDER, epoch).permutation(count)
