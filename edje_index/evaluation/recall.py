"""Ranks and recall, in NumPy alone.

Shape letters: q queries, c candidates, p candidates in a pool. A rank counts from 0; the rank of a query is that of its
best relevant candidate. Equal similarities keep the order of the candidates, equal scores that of the similarities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def nearest(similarities: Floats, count: int) -> Ints:
    """The `count` (at most c) candidates of highest similarity [q, c], best first -> [q, min(count, c)]."""
    count = min(count, similarities.shape[1])
    kept = np.empty((len(similarities), count), dtype=np.int64)
    for row, values in enumerate(similarities):
        # All that reach the last place, so that ties at it are decided by order and not by the partition.
        last = np.partition(values, -count)[-count]
        reach = np.flatnonzero(values >= last)
        kept[row] = reach[np.argsort(-values[reach], kind="stable")[:count]]
    return kept


def ranks_by_similarity(similarities: Floats, relevant: Bools) -> Ints:
    """Ranks [q] by similarity [q, c] alone; c for a query without a relevant candidate."""
    places = np.arange(similarities.shape[1])
    best = np.where(relevant, similarities, -np.inf)
    at = best.argmax(axis=1)[:, None]
    score = np.take_along_axis(best, at, axis=1)
    better = (similarities > score) | ((similarities == score) & (places < at))
    ranks = better.sum(axis=1)
    found: Ints = np.where(relevant.any(axis=1), ranks, similarities.shape[1]).astype(np.int64)
    return found


def ranks_after_reranking(scores: Floats, relevant: Bools, pool: int, ranks: Ints) -> Ints:
    """Ranks [q] after the first `pool` candidates are sorted by score.

    Args:
        scores: [q, p] of the candidates in the order of their similarity.
        relevant: [q, p].
        pool: candidates that are sorted; those behind them keep their places.
        ranks: [q] by similarity.
    """
    order = np.argsort(-scores[:, :pool], axis=1, kind="stable")
    found = np.take_along_axis(relevant[:, :pool], order, axis=1)
    after: Ints = np.where(found.any(axis=1), found.argmax(axis=1), ranks).astype(np.int64)
    return after


def hits(ranks: Ints, cutoffs: Sequence[int]) -> Bools:
    """Whether each query's rank [q] is among the first k, for each cutoff k -> [q, len(cutoffs)]; its mean is R@k."""
    found: Bools = ranks[:, None] < np.array(cutoffs)
    return found
