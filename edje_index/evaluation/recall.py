"""Finds the pools of many queries by an exact search over the embeddings, and computes ranks and recall.

The rank of a query is the rank of the best relevant candidate, counted from 0. Equal scores keep the input order.

Shape letters: q queries, c candidates, p candidates in a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_CHUNK_NUMBERS = 1 << 24  # similarities in memory at a time


@dataclass(frozen=True)
class Pools:
    """The p nearest candidates of each of q queries, nearest first.

    Attributes:
        candidates: index of each pool entry among all candidates, int64 [q, p].
        similarities: cosine similarity of each pool entry to the query, float32 [q, p].
        relevant: which pool entries are relevant to the query, bool [q, p].
        ranks: rank of the most similar relevant candidate of each query among all candidates, counted from 0,
            int64 [q].
    """

    candidates: Ints
    similarities: Floats
    relevant: Bools
    ranks: Ints


def embedding_pools(
    queries: Floats, candidates: Floats, query_labels: Ints, candidate_labels: Ints, pool: int
) -> Pools:
    """Return the pools of `queries` [q, e] among `candidates` [c, e].

    A candidate is relevant to a query if both have the same label. `pool` is the number of candidates per query.
    """
    chunk = max(1, _CHUNK_NUMBERS // len(candidates))
    parts = []
    for start in range(0, len(queries), chunk):
        similarities = queries[start : start + chunk] @ candidates.T
        relevant = query_labels[start : start + chunk, None] == candidate_labels
        kept = nearest(similarities, pool)
        taken = (np.take_along_axis(values, kept, axis=1) for values in (similarities, relevant))
        parts.append((kept, *taken, ranks_by_similarity(similarities, relevant)))
    return Pools(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def nearest(similarities: Floats, count: int) -> Ints:
    """Return the column numbers of the `count` highest values in each row of `similarities` [q, c].

    The result is int64 [q, min(count, c)], with the highest value first.
    """
    count = min(count, similarities.shape[1])
    kept = np.empty((len(similarities), count), dtype=np.int64)
    for row, values in enumerate(similarities):
        # Take all candidates that tie for the last position. Their order decides then, not the partition.
        last = np.partition(values, -count)[-count]
        reach = np.flatnonzero(values >= last)
        kept[row] = reach[np.argsort(-values[reach], kind="stable")[:count]]
    return kept


def ranks_by_similarity(similarities: Floats, relevant: Bools) -> Ints:
    """Return the rank of each query by similarity, int64 [q]. The rank is c for a query without a relevant candidate.

    Args:
        similarities: similarity of each candidate to each query, float32 [q, c].
        relevant: which candidates are relevant to each query, bool [q, c].
    """
    positions = np.arange(similarities.shape[1])
    best = np.where(relevant, similarities, -np.inf)
    at = best.argmax(axis=1)[:, None]
    score = np.take_along_axis(best, at, axis=1)
    better = (similarities > score) | ((similarities == score) & (positions < at))
    ranks = better.sum(axis=1)
    capped: Ints = np.where(relevant.any(axis=1), ranks, similarities.shape[1]).astype(np.int64)
    return capped


def ranks_after_reranking(scores: Floats, relevant: Bools, pool: int, ranks: Ints) -> Ints:
    """Return the rank of each query after the first `pool` candidates are sorted by score, int64 [q].

    The rank does not change for a query without a relevant candidate among the first `pool` candidates.

    Args:
        scores: final scores of the candidates, float32 [q, p]. The candidates are sorted by similarity.
        relevant: which candidates are relevant to each query, bool [q, p].
        pool: number of candidates to re-rank.
        ranks: ranks by similarity, int64 [q].
    """
    order = np.argsort(-scores[:, :pool], axis=1, kind="stable")
    sorted_relevant = np.take_along_axis(relevant[:, :pool], order, axis=1)
    after: Ints = np.where(sorted_relevant.any(axis=1), sorted_relevant.argmax(axis=1), ranks).astype(np.int64)
    return after


def hits(ranks: Ints, cutoffs: Sequence[int]) -> Bools:
    """Return which queries have a rank less than each cutoff, bool [q, len(cutoffs)]. The mean of a column is R@k."""
    below: Bools = ranks[:, None] < np.array(cutoffs)
    return below
