"""Weights by maximum likelihood, in worlds whose weights are known, and what a
choice of weights reports.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.scoring.final_score import FinalScore, relevance
from edje_index.scoring.weights import HubnessSimilarity, ScoreWeights
from edje_index.training.fit_weights import (
    DevPools,
    HubnessProducts,
    choose_weights,
    fit_calibration,
    fit_weights,
)

TRUE = ScoreWeights(
    embedding=2.0,
    late=0.5,
    pooled=1.0,
    hubness=1.0,
    hubness_similarity=HubnessSimilarity(2.0, 1.0, 1.0),
)


def dev_pools(parts, right, hubness=None) -> DevPools:
    return DevPools(parts, right, np.arange(len(right)), hubness)


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
    assert (fitted["logit"], fitted["hubness"]) == (1, 0)


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


def world_with_hubs(
    weights: ScoreWeights, queries: int = 4000, images: int = 40, pool: int = 6
) -> DevPools:
    """Pools in which the final score with `weights` is the truth.

    Images differ in how near they are to captions of the bank; the logits contain that
    nearness, too.
    """
    rng = np.random.default_rng(0)
    embedding, pooled = (
        torch.from_numpy(rng.standard_normal((images, 30)) * 0.2) for _ in range(2)
    )
    embedding += torch.from_numpy(rng.standard_normal((images, 1)))
    products = HubnessProducts(
        embedding, pooled, rng.integers(0, images, (queries, pool))
    )
    logits, *others = rng.standard_normal((4, queries, pool))
    correction = products.correction(weights.hubness_similarity)
    logits -= weights.hubness * correction
    parts = dict(
        zip(["logit", "embedding", "late", "pooled"], [logits, *others], strict=True)
    )
    final = FinalScore.of(weights).sum({**parts, "hubness": correction})
    best = (final + rng.gumbel(size=final.shape)).argmax(axis=1)
    return dev_pools(parts, np.arange(pool) == best[:, None], products)


def weighted_correction(pools: DevPools, weights: ScoreWeights) -> np.ndarray:
    return weights.hubness * pools.hubness.correction(weights.hubness_similarity)


def test_the_hubness_correction_is_fitted_with_the_weights_that_it_contains():
    pools = world_with_hubs(TRUE)
    fitted = fit_weights(pools)
    by_part, true = fitted.by_part(), TRUE.by_part()
    assert {
        part: by_part[part] for part in ("embedding", "late", "pooled")
    } == pytest.approx(
        {part: true[part] for part in ("embedding", "late", "pooled")}, rel=0.15
    )
    assert (fitted.hubness_similarity.embedding, fitted.hubness_similarity.pooled) == (
        fitted.embedding,
        fitted.pooled,
    )
    values, wanted = (weighted_correction(pools, weights) for weights in (fitted, TRUE))
    assert np.corrcoef(values.ravel(), wanted.ravel())[0, 1] > 0.99
    assert values.std() == pytest.approx(wanted.std(), rel=0.15)
    without = fit_weights(replace(pools, hubness=None))
    assert abs(without.embedding - 2.0) > abs(fitted.embedding - 2.0), (
        "the others make up for the missing correction"
    )


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
