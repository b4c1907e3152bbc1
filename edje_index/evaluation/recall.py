"""Finds the pools of many queries by an exact search over the embeddings, and computes
ranks, recall and intervals.

The rank of a query is the position of its best relevant candidate among the sorted
candidates, counted from 0. Candidates with equal scores keep the input order.

Confidence intervals come from the percentile bootstrap over clusters of queries (Efron
and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13). A cluster
contains all queries of one image, because these queries are not independent. All
statistics use the same resamples, so the difference between two statistics also has an
interval.

Shape letters: q queries, c candidates, p candidates in a pool, e width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.arrays import Bools, Floats, Ints

# number of similarities in memory at a time
_CHUNK_NUMBERS = 1 << 24
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Pools:
    """The p nearest candidates of each of q queries, nearest first.

    Attributes:
        query_labels: label of each query, int64 [q]. A candidate with the same label is
            relevant.
        candidates: position of each pool entry among all candidates, int64 [q, p].
        similarities: cosine similarity of each pool entry to the query, float32 [q, p].
        relevant: which pool entries are relevant to the query, bool [q, p].
        ranks: rank of the most similar relevant candidate of each query among all
            candidates, counted from 0, int64 [q].
    """

    query_labels: Ints
    candidates: Ints
    similarities: Floats
    relevant: Bools
    ranks: Ints


def embedding_pools(
    queries: Floats,
    candidates: Floats,
    query_labels: Ints,
    candidate_labels: Ints,
    pool: int,
) -> Pools:
    """Return the pools of `queries` [q, e] among `candidates` [c, e].

    A candidate is relevant to a query if both have the same label. `pool` is the number
    of candidates per query.
    """
    chunk = max(1, _CHUNK_NUMBERS // len(candidates))
    parts = []
    for start in range(0, len(queries), chunk):
        similarities = queries[start : start + chunk] @ candidates.T
        relevant = query_labels[start : start + chunk, None] == candidate_labels
        kept = nearest(similarities, pool)
        taken = (
            np.take_along_axis(values, kept, axis=1)
            for values in (similarities, relevant)
        )
        parts.append((kept, *taken, ranks_by_similarity(similarities, relevant)))
    joined = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Pools(query_labels, *joined)


def nearest(similarities: Floats, count: int) -> Ints:
    """Return the column numbers of the `count` highest values in each row of
    `similarities` [q, c].

    The result is int64 [q, min(count, c)], with the highest value first.
    """
    count = min(count, similarities.shape[1])
    kept = np.empty((len(similarities), count), dtype=np.int64)
    for row, values in enumerate(similarities):
        # `last` is the value of the last candidate to keep. `reach` has all candidates
        # with at least this value, which can be more than `count`. The stable sort then
        # prefers equal values that come first in the input.
        last = np.partition(values, -count)[-count]
        reach = np.flatnonzero(values >= last)
        kept[row] = reach[np.argsort(-values[reach], kind="stable")[:count]]
    return kept


def ranks_by_similarity(similarities: Floats, relevant: Bools) -> Ints:
    """Return the rank of each query by similarity, int64 [q]. The rank is c for a query
    without a relevant candidate.

    Args:
        similarities: similarity of each candidate to each query, float32 [q, c].
        relevant: which candidates are relevant to each query, bool [q, c].
    """
    positions = np.arange(similarities.shape[1])
    best = np.where(relevant, similarities, -np.inf)
    # position and similarity of the most similar relevant candidate of each query
    at = best.argmax(axis=1)[:, None]
    score = np.take_along_axis(best, at, axis=1)
    # A candidate with the same similarity as the best relevant candidate ranks before
    # that candidate if it has a lower position.
    better = (similarities > score) | ((similarities == score) & (positions < at))
    ranks = better.sum(axis=1)
    capped: Ints = np.where(relevant.any(axis=1), ranks, similarities.shape[1]).astype(
        np.int64
    )
    return capped


def ranks_after_reranking(
    scores: Floats, relevant: Bools, pool: int, ranks: Ints
) -> Ints:
    """Return the rank, from 0 on, of the first relevant candidate of each query after
    the first `pool` candidates are sorted by score, int64 [q].

    If none of the first `pool` candidates of a query is relevant, the rank in `ranks`
    is returned.

    Args:
        scores: final scores of the candidates, float32 [q, p]. The candidates are
            sorted by similarity.
        relevant: which candidates are relevant to each query, bool [q, p].
        ranks: ranks by similarity, int64 [q].
    """
    order = np.argsort(-scores[:, :pool], axis=1, kind="stable")
    sorted_relevant = np.take_along_axis(relevant[:, :pool], order, axis=1)
    after: Ints = np.where(
        sorted_relevant.any(axis=1), sorted_relevant.argmax(axis=1), ranks
    ).astype(np.int64)
    return after


def hits(ranks: Ints, cutoffs: Sequence[int]) -> Bools:
    """Return which queries have a rank less than each cutoff, bool [q,
    len(cutoffs)]. The mean of a column is R@k.
    """
    below: Bools = ranks[:, None] < np.array(cutoffs)
    return below


@dataclass(frozen=True)
class Estimate:
    """A mean with the bounds of its 95 % confidence interval. The bounds are None if
    there were no bootstrap resamples.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the interval. Without resamples, both bounds are the mean."""
        if self.low is None or self.high is None:
            return self.value, self.value
        return self.low, self.high


@dataclass(frozen=True)
class ClusterBootstrap:
    """Bootstrap resamples of clusters of queries.

    Attributes:
        clusters: a number for each query, int64 [q]. Queries with the same number are
            in the same cluster.
        resamples: number of resamples. If it is 0, estimates have no confidence
            intervals.
    """

    clusters: Ints
    resamples: int = 1000
    seed: int = 0

    def estimates(self, values: NDArray[np.floating]) -> list[Estimate]:
        """Return the mean and the confidence interval of each column of `values`
        [q, s].
        """
        means = values.mean(axis=0, dtype=np.float64)
        if not self.resamples:
            return [Estimate(float(mean)) for mean in means]
        tail = 50 * (1 - _CONFIDENCE)
        low, high = np.percentile(self.means(values), [tail, 100 - tail], axis=0)
        return [
            Estimate(*map(float, triple))
            for triple in zip(means, low, high, strict=True)
        ]

    def means(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Compute the mean of each column of `values` [q, s] in each resample,
        float64 [resamples, s].
        """
        # `sums` has one line per cluster: the sum of each column, and then the number
        # of queries.
        labels, cluster_of_query = np.unique(self.clusters, return_inverse=True)
        count = len(labels)
        sums = np.zeros((count, values.shape[1] + 1))
        np.add.at(
            sums, cluster_of_query, np.column_stack([values, np.ones(len(values))])
        )
        # Each resample draws `count` clusters with replacement, and adds up their sums.
        rng = np.random.default_rng(self.seed)
        totals = np.array(
            [
                np.bincount(rng.integers(0, count, count), minlength=count) @ sums
                for _ in range(self.resamples)
            ]
        )
        result: NDArray[np.float64] = totals[:, :-1] / totals[:, -1:]
        return result
