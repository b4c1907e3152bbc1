"""Caches the values of images that the final score needs in addition to the tokens:
pooled vectors and token scales.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.scoring.parts import Images, Scorer

# Number of slots. With the shipped model, they take at most 48 MB. The operating system
# allocates the memory of a slot when the slot is first used.
_SLOTS = 1 << 15


class ImageCache:
    """Keeps the pooled vectors and token scales of images by row id. Thread-safe.

    The slot of a row is its row id modulo the number of slots, so a look-up of 100 rows
    takes microseconds. A slot has the values of one row. If two rows have the same
    slot, the row that was stored last replaces the other.

    Args:
        scorer: computes the values of images that are not in the cache.
        num_tokens: number of tokens per image, m.
    """

    def __init__(self, scorer: Scorer, num_tokens: int) -> None:
        self._scorer = scorer
        self._lock = threading.Lock()
        self._rows = np.full(_SLOTS, -1, dtype=np.int64)
        self._pooled = np.empty((_SLOTS, scorer.pooled_dim), dtype=np.float32)
        self._token_scales = np.empty((_SLOTS, num_tokens), dtype=np.float32)

    def images(self, rows: NDArray[np.int64], tokens: torch.Tensor) -> Images:
        """Return the images `rows` [b], whose tokens are `tokens` [b, m, d]."""
        slots = rows % _SLOTS
        with self._lock:
            missing = self._rows[slots] != rows
            pooled = self._pooled[slots]
            token_scales = self._token_scales[slots]
        if missing.any():
            computed = self._scorer.images(tokens[torch.from_numpy(missing)])
            pooled[missing] = computed.pooled.numpy(force=True)
            token_scales[missing] = computed.token_scales.numpy(force=True)
            with self._lock:
                self._rows[slots] = rows
                self._pooled[slots] = pooled
                self._token_scales[slots] = token_scales
        return Images(tokens, torch.from_numpy(pooled), torch.from_numpy(token_scales))
