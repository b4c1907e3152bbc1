"""Confidence intervals by the percentile bootstrap over clusters of queries.

A cluster contains all queries of one image, because these queries are not independent. See Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapter 13. All statistics use the same resamples. Therefore a difference between
two statistics also has a confidence interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_CHUNK_DRAWS = 1 << 22  # draws in memory at a time


@dataclass(frozen=True)
class Estimate:
    """A mean with the bounds of the 95 % confidence interval. The bounds are None without resamples."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ClusterBootstrap:
    """Bootstrap resamples of clusters of queries.

    Attributes:
        clusters: number of the cluster of each query, int64 [q].
        resamples: number of resamples. If it is 0, estimates have no confidence intervals.
        seed: seed of the random resamples.
    """

    clusters: NDArray[np.int64]
    resamples: int = 1000
    seed: int = 0

    def estimates(self, values: NDArray[np.floating]) -> list[Estimate]:
        """Return the mean and the confidence interval of each column of `values` [q, s]."""
        means = values.mean(axis=0, dtype=np.float64)
        if not self.resamples:
            return [Estimate(float(mean)) for mean in means]
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(self.means(values), [tail, 100 - tail], axis=0)
        return [Estimate(*map(float, triple)) for triple in zip(means, low, high, strict=True)]

    def means(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Compute the mean of each column of `values` [q, s] in each resample, float64 [resamples, s]."""
        cluster_of_query, multiplicities = self._resampled
        sums = np.zeros((multiplicities.shape[1], values.shape[1] + 1))
        np.add.at(sums, cluster_of_query, np.column_stack([values, np.ones(len(values))]))
        chunk = max(1, _CHUNK_DRAWS // len(sums))
        totals = np.concatenate(
            [multiplicities[at : at + chunk].astype(np.float64) @ sums for at in range(0, self.resamples, chunk)]
        )
        result: NDArray[np.float64] = totals[:, :-1] / totals[:, -1:]
        return result

    @cached_property
    def _resampled(self) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """Return the cluster of each query [q], and how often each resample contains each cluster."""
        labels, cluster_of_query = np.unique(self.clusters, return_inverse=True)
        count = len(labels)
        rng = np.random.default_rng(self.seed)
        drawn = np.empty((self.resamples, count), dtype=np.uint16)
        chunk = max(1, _CHUNK_DRAWS // count)
        for at in range(0, self.resamples, chunk):
            part = drawn[at : at + chunk]
            cells = rng.integers(0, count, part.shape) + np.arange(len(part))[:, None] * count
            part[:] = np.bincount(cells.ravel(), minlength=part.size).reshape(part.shape)
        return cluster_of_query, drawn
