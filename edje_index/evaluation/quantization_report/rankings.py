"""Compares the rankings that two sets of scores give to the same candidates."""

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
    """How rankings change from reference scores to other scores, over a set of queries.

    Attributes:
        queries: number of queries.
        top1_kept: share of queries whose best candidate stays the same.
        overlap_at_10: share of the ten best candidates that stay among the ten best, averaged over queries.
        kendall_tau: distribution over queries of Kendall's tau-b between both scores.
        score_change: mean absolute difference between both scores of a candidate.
        score_change_relative: `score_change` / standard deviation of the query's reference scores, averaged over
            queries.
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
        reference: reference scores of the candidates of each query, float32 [k] per query, k >= 2.
        other: other scores of the same candidates in the same order.
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
    """Return the positions of `scores` [k], best score first. Equal scores keep their order, as in search."""
    return np.argsort(-scores, kind="stable")


def overlap(left: Scores, right: Scores, k: int) -> float:
    """Return the share of the `k` best candidates that is the same on both sides."""
    k = min(k, len(left))
    return len(np.intersect1d(ranking(left)[:k], ranking(right)[:k])) / k


def kendall_tau(left: Scores, right: Scores) -> float:
    """Return Kendall's tau-b of two arrays of scores [k], k >= 2.

    Ties are treated as in M. G. Kendall, "Rank Correlation Methods". If one side is constant, the result is 1 if the
    other side is constant too, else 0.
    """
    above = np.triu_indices(len(left), 1)
    a, b = (np.sign(scores[:, None].astype(np.float64) - scores)[above] for scores in (left, right))
    ordered = np.sqrt(float(np.abs(a).sum()) * float(np.abs(b).sum()))
    if ordered == 0:
        return float(np.array_equal(a, b))
    return float((a * b).sum() / ordered)
