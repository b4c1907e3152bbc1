"""Comparison of rankings at two precisions, and the advice that follows from it."""

from __future__ import annotations

import numpy as np
import pytest

from edje_index.evaluation.quantization import (
    WHOLE_SCORE,
    PrecisionCost,
    RankingChange,
    advice,
    compare_rankings,
)
from edje_index.evaluation.recall import ClusterBootstrap, Estimate

REFERENCE = [
    np.array(values, np.float32) for values in ([3, 2, 1], [1, 2, 3], [1, 1, 0])
]
HITS = [np.array(values) for values in ([True, False, False],) * 3]


def test_first_hits_and_recall_are_compared_per_query():
    other = [
        np.array(values, np.float32) for values in ([1, 2, 0], [1, 2, 4], [1, 1, 0])
    ]
    bootstrap = ClusterBootstrap(np.arange(3), 200)
    change = compare_rankings(REFERENCE, other, HITS, bootstrap)
    assert change.first_kept.value == pytest.approx(200 / 3)
    assert change.loss.value == pytest.approx(100 / 3)
    assert 0 <= change.loss.low <= change.loss.value <= change.loss.high <= 100
    assert compare_rankings(REFERENCE, other, None, bootstrap).loss is None
    same = compare_rankings(REFERENCE, REFERENCE, HITS, bootstrap)
    assert (same.first_kept, same.loss) == (
        Estimate(100.0, 100.0, 100.0),
        Estimate(0.0, 0.0, 0.0),
    )


def cost(name, size, loss, spread=0.4):
    estimate = Estimate(loss, loss - spread, loss + spread)
    change = RankingChange(Estimate(100 - loss), estimate)
    return PrecisionCost(name, False, size, 0.1, {WHOLE_SCORE: change})


def test_the_smallest_precision_that_loses_no_more_than_a_point_is_kept():
    costs = [
        cost("fp8", 24640, 0.0),
        cost("nvfp4", 13824, 0.2),
        cost("sign1", 3200, 6.0),
    ]
    assert advice("bf16", 49152, costs) == (
        "keep nvfp4: 13.8 kB per image, loses 0.2 points of R@1 (-0.2 to +0.6);"
        " sign1 would lose 6.0 points of R@1"
    )
    # its interval reaches beyond a point
    costs[1] = cost("nvfp4", 13824, 0.8)
    assert advice("bf16", 49152, costs).startswith("keep fp8: 24.6 kB")
    assert advice("bf16", 49152, [cost("sign1", 3200, 6.0)]) == (
        "keep bf16: 49.2 kB per image; sign1 would lose 6.0 points of R@1"
    )
    assert advice("bf16", 49152, []) is None
    unlabelled = RankingChange(Estimate(98.0, 97.5, 99.0), None)
    found = PrecisionCost("nvfp4", True, 13824, 0.1, {WHOLE_SCORE: unlabelled})
    assert advice("bf16", 49152, [found]) == (
        "keep nvfp4: 13.8 kB per image, changes 2.0 % of the first hits (+1.0 to +2.5)"
    )
