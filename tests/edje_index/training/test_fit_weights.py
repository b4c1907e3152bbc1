"""Weights by maximum likelihood, in worlds whose weights are known, and what a
choice of weights reports.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edje_index.scoring.final_score import FinalScore, relevance
from edje_index.scoring.weights import ScoreWeights
from edje_index.training.fit_weights import (
    DevPools,
    choose_weights,
    fit_calibration,
    fit_weights,
)


def dev_pools(parts, right) -> DevPools:
    return DevPools(parts, right, np.arange(len(right)))


def noisy_pools(
    weights: dict[str, float], captions: int = 4000, pool: int = 5
) -> DevPools:
    """A world in which the softmax of the final score with these weights is the
    truth.
    """
    rng = np.random.default_rng(0)
    parts = dict(
        zip(
            ["logit", *weights],
            rng.standard_normal((1 + len(weights), captions, pool)),
            strict=True,
        )
    )
    scores = FinalScore({"logit": 1.0, **weights}).sum(parts)
    best = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    return dev_pools(parts, np.arange(pool) == best[:, None])


def test_the_true_weights_are_found():
    weights = {"embedding": 2.0, "late": 0.5, "pooled": 3.0}
    fitted = fit_weights(noisy_pools(weights)).by_part()
    assert {part: fitted[part] for part in weights} == pytest.approx(weights, rel=0.15)
    assert fitted["logit"] == 1


def test_relevance_is_the_share_of_relevant_candidates_at_even_chances():
    rng = np.random.default_rng(0)
    scores = rng.normal(300, 100, (400, 50)).astype(np.float32)
    right = rng.random(scores.shape) < 1 / (1 + np.exp(9 - 0.02 * scores))
    calibration = fit_calibration(scores, right)
    odds = (1 - right.mean()) / right.mean()
    assert calibration == pytest.approx((0.02, -9 + np.log(odds)), rel=0.05)
    rated = relevance(scores, ScoreWeights(embedding=2.0, calibration=calibration))
    certain = rated > 0.5
    weights = np.where(right, odds, 1)
    share = np.average(right[certain], weights=weights[certain])
    assert np.average(rated[certain], weights=weights[certain]) == pytest.approx(
        share, abs=0.02
    )
    assert fit_calibration(scores, scores < 0) is None
    assert fit_calibration(scores, scores < 300) is None
    chosen = choose_weights(noisy_pools({"embedding": 2.0})).weights
    assert ScoreWeights.from_json(chosen.to_json()) == chosen
    assert chosen.calibration is not None


def test_no_weight_is_negative_and_the_others_are_fitted_without_it():
    pools = noisy_pools({"embedding": 2.0, "late": -1.0})
    fitted = fit_weights(pools)
    assert fitted.late == 0
    alone = replace(
        pools, parts={part: pools.parts[part] for part in ("logit", "embedding")}
    )
    assert fitted.embedding == pytest.approx(fit_weights(alone).embedding, rel=1e-3)


def test_held_out_queries_are_scored_with_weights_of_other_images():
    """Each query alone, with weights fitted to the queries of the images in the
    other fifths.
    """
    pools = noisy_pools({"embedding": 2.0, "late": 0.5}, 60)
    pools = replace(pools, images=np.arange(60) // 5)
    hits = []
    for query in range(60):
        others = np.array(
            [
                (pools.images[other] - pools.images[query]) % 5 != 0
                for other in range(60)
            ]
        )
        weights = fit_weights(pools.select(others)).by_part()
        final = sum(
            weights[part] * values[query].astype(np.float64)
            for part, values in pools.parts.items()
        )
        hits.append(pools.right[query][final.argmax()])
    assert choose_weights(pools).held_out_recall == pytest.approx(np.mean(hits))
