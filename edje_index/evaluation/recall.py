"""Ranks and recall.

Shape letters: q queries, c candidates, p candidates in a pool. Ranks count from 0. The rank of a query is that of its
best relevant candidate. Candidates with equal similarities keep their order, and so do those with equal scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def nearest(similarities: Floats, count: int) -> Ints:
    """Positions of the `count` highest similarities in each row [q, c], highest first: [q, min(count, c)]."""
    count = min(count, similarities.shape[1])
    kept = np.empty((len(similarities), count), dtype=np.int64)
    for row, values in enumerate(similarities):
        # All candidates that tie for the last position, so that their order decides and not the partition.
        last = np.partition(values, -count)[-count]
        reach = np.flatnonzero(values >= last)
        kept[row] = reach[np.argsort(-values[reach], kind="stable")[:count]]
    return kept


def ranks_by_similarity(similarities: Floats, relevant: Bools) -> Ints:
    """Ranks [q] by similarity [q, c]; c for a query without a relevant candidate."""
    positions = np.arange(similarities.shape[1])
    best = np.where(relevant, similarities, -np.inf)
    at = best.argmax(axis=1)[:, None]
    score = np.take_along_axis(best, at, axis=1)
    better = (similarities > score) | ((similarities == score) & (positions < at))
    ranks = better.sum(axis=1)
    capped: Ints = np.where(relevant.any(axis=1), ranks, similarities.shape[1]).astype(np.int64)
    return capped


def ranks_after_reranking(scores: Floats, relevant: Bools, pool: int, ranks: Ints) -> Ints:
    """Ranks [q] after the first `pool` candidates are sorted by score. The others keep their ranks.

    Args:
        scores: final scores of the candidates, in the order of their similarity [q, p].
        relevant: whether each candidate is a right answer [q, p].
        pool: number of candidates that are sorted.
        ranks: ranks by similarity [q].
    """
    order = np.argsort(-scores[:, :pool], axis=1, kind="stable")
    sorted_relevant = np.take_along_axis(relevant[:, :pool], order, axis=1)
    after: Ints = np.where(sorted_relevant.any(axis=1), sorted_relevant.argmax(axis=1), ranks).astype(np.int64)
    return after


def hits(ranks: Ints, cutoffs: Sequence[int]) -> Bools:
    """Whether the rank of each query [q] is below each cutoff k: [q, len(cutoffs)]. The mean of a column is R@k."""
    below: Bools = ranks[:, None] < np.array(cutoffs)
    return below
