"""Compares two rankings of the same candidates, by two sets of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edje_index.evaluation.quantization_report.distribution import Distribution

Scores = NDArray[np.float32]
OVERLAP_AT = 10


@dataclass(frozen=True)
class RankingChange:
    """Changes of rankings when other scores replace reference scores.

    Attributes:
        queries: number of queries.
        top1_kept: fraction of queries with the same best candidate in both rankings.
        overlap_at_10: fraction of the ten best candidates that both rankings share, averaged over queries.
        kendall_tau: Kendall's tau-b between both rankings, as a distribution over queries.
        score_change: absolute difference between both scores of a candidate, averaged over candidates and queries.
        score_change_relative: for one query, mean absolute difference / standard deviation of the reference scores.
            This ratio is averaged over queries.
    """

    queries: int
    top1_kept: float
    overlap_at_10: float
    kendall_tau: Distribution
    score_change: float
    score_change_relative: float


def compare_rankings(reference: Sequence[Scores], other: Sequence[Scores]) -> RankingChange:
    """Compare two sets of scores for the same candidates of each query.

    Args:
        reference: for each query, reference scores of k candidates, float32 [k], k >= 2.
        other: for each query, other scores of the same candidates in the same order, float32 [k].
    """
    pairs = list(zip(reference, other, strict=True))
    changes = np.array([np.abs(left - right).mean(dtype=np.float64) for left, right in pairs])
    spreads = np.array([left.std(dtype=np.float64) for left, _ in pairs])
    spread = spreads > 0
    return RankingChange(
        queries=len(pairs),
        top1_kept=float(np.mean([ranking(left)[0] == ranking(right)[0] for left, right in pairs])),
        overlap_at_10=float(np.mean([overlap(left, right, OVERLAP_AT) for left, right in pairs])),
        kendall_tau=Distribution.of(np.array([kendall_tau(left, right) for left, right in pairs])),
        score_change=float(changes.mean()),
        score_change_relative=float(np.mean(changes[spread] / spreads[spread])) if spread.any() else 0.0,
    )


def ranking(scores: Scores) -> NDArray[np.intp]:
    """Return the indices that sort `scores` [k], highest score first. Equal scores keep the input order."""
    return np.argsort(-scores, kind="stable")


def overlap(left: Scores, right: Scores, k: int) -> float:
    """Return the fraction of the `k` best candidates by `left` that are also among the `k` best by `right`."""
    k = min(k, len(left))
    return len(np.intersect1d(ranking(left)[:k], ranking(right)[:k])) / k


def kendall_tau(left: Scores, right: Scores) -> float:
    """Return Kendall's tau-b of two arrays of scores [k], k >= 2.

    For ties, see M. G. Kendall, "Rank Correlation Methods". If both arrays are constant, the result is 1. If only one
    array is constant, the result is 0.
    """
    above = np.triu_indices(len(left), 1)
    a, b = (np.sign(scores[:, None].astype(np.float64) - scores)[above] for scores in (left, right))
    ordered = np.sqrt(float(np.abs(a).sum()) * float(np.abs(b).sum()))
    if ordered == 0:
        return float(np.array_equal(a, b))
    return float((a * b).sum() / ordered)
