"""Weights by maximum likelihood, in worlds whose weights are known, and what a
choice of weights reports.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edje_index.scoring.weights import ScoreWeights, relevance
from edje_index.training.fit_weights import (
    DevPools,
    choose_weights,
    fit_calibration,
    fit_weights,
)


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
    scores = ScoreWeights.of_parts({"logit": 1.0, **weights}).sum(parts)
    best = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    return DevPools(parts, np.arange(pool) == best[:, None])


def test_the_true_weights_are_found():
    weights = {"embedding": 2.0, "late": 0.5, "pooled": 3.0}
    fitted = fit_weights(noisy_pools(weights)).by_part()
    assert {part: fitted[part] for part in weights} == pytest.approx(weights, rel=0.15)
    assert fitted["logit"] == 1


def test_relevance_is_the_share_of_matches_at_even_chances():
    """Of two normal distributions, this share is a logistic function."""
    rng = np.random.default_rng(0)
    scores = rng.normal(300, 50, (20_000, 2)).astype(np.float32)
    scores[:, 0] += 100
    right = np.zeros(scores.shape, dtype=bool)
    right[:, 0] = True
    slope, offset = fit_calibration(scores, right)
    assert (slope, offset) == pytest.approx((0.04, -14), rel=0.05)


def test_the_best_hit_of_a_caption_without_a_match_is_rated_low():
    rng = np.random.default_rng(0)
    scores = rng.normal(200, 50, (2000, 40)).astype(np.float32)
    right = np.zeros(scores.shape, dtype=bool)
    right[:, 7] = True
    scores[right] = rng.normal(400, 50, 2000)
    weights = ScoreWeights(embedding=2.0, calibration=fit_calibration(scores, right))
    best = np.where(right, -np.inf, scores).max(axis=1)
    assert (relevance(scores[right], weights) > 0.5).mean() > 0.9
    assert (relevance(best, weights) < 0.5).mean() > 0.7


def test_without_a_match_that_scores_higher_there_is_no_relevance():
    scores = np.random.default_rng(0).normal(size=(50, 20))
    right = np.zeros(scores.shape, dtype=bool)
    assert fit_calibration(scores, right) is None
    assert fit_calibration(scores, ~right) is None
    right[np.arange(50), scores.argmin(axis=1)] = True
    assert fit_calibration(scores, right) is None


def test_the_chosen_weights_have_a_relevance_and_shares_of_the_spread():
    pools = noisy_pools({"embedding": 2.0})
    chosen = choose_weights(pools).weights
    assert ScoreWeights.from_json(chosen.to_json()) == chosen
    assert chosen.calibration is not None
    spreads = {part: values.std() for part, values in pools.parts.items()}
    products = {
        part: weight * spreads.get(part, 0.0)
        for part, weight in chosen.by_part().items()
    }
    total = sum(products.values())
    shares = {part: product / total for part, product in products.items()}
    assert chosen.shares == pytest.approx(shares, rel=1e-4)
    share = 100 * products["embedding"] / total
    assert f"{share:.0f} % embedding similarity" in chosen.described()


def test_no_weight_is_negative_and_the_others_are_fitted_without_it():
    pools = noisy_pools({"embedding": 2.0, "late": -1.0})
    fitted = fit_weights(pools)
    assert fitted.late == 0
    alone = replace(
        pools, parts={part: pools.parts[part] for part in ("logit", "embedding")}
    )
    assert fitted.embedding == pytest.approx(fit_weights(alone).embedding, rel=1e-3)
