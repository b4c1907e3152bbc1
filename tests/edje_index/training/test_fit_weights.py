"""What is fitted after a training: the weights of the final score, and the pooled
similarity.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.weights import PART_NAMES, ScoreWeights
from edje_index.training.fit_weights import (
    DevPools,
    choose_weights,
    fit_calibration,
    fit_weights,
)
from edje_index.training.pooled_similarity import (
    MIN_CAPTIONS,
    canonical_maps,
    fit_pooled_similarity,
)
from edje_index.training.start import trained_part


def noisy_pools(weights, captions=4000, pool=5):
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
    weights = chosen.by_part()
    products = {part: weights[part] * pools.parts[part].std() for part in weights}
    total = sum(products.values())
    shares = {part: products.get(part, 0) / total for part in PART_NAMES}
    assert chosen.shares == pytest.approx(shares, rel=1e-4)
    assert f"{100 * shares['embedding']:.0f} % embedding" in chosen.described()


def test_no_weight_is_negative_and_the_others_are_fitted_without_it():
    pools = noisy_pools({"embedding": 2.0, "late": -1.0})
    fitted = fit_weights(pools)
    assert fitted.late == 0
    others = {part: pools.parts[part] for part in ("logit", "embedding")}
    alone = fit_weights(replace(pools, parts=others))
    assert fitted.embedding == pytest.approx(alone.embedding, rel=1e-3)


def covariances(rng):
    shared = rng.standard_normal((400, 3))
    x = np.concatenate(
        [shared + rng.standard_normal((400, 3)), rng.standard_normal((400, 4))], axis=1
    )
    y = np.concatenate(
        [shared @ rng.standard_normal((3, 3)), rng.standard_normal((400, 2))], axis=1
    )
    x = torch.from_numpy(x - x.mean(0))
    y = torch.from_numpy(y - y.mean(0))
    return x.T @ x / 400, y.T @ y / 400, x.T @ y / 400


def test_canonical_maps_are_defined_by_their_covariances():
    """What makes them canonical: each side uncorrelated under its ridged
    covariance, and across only pair by pair.
    """
    xx, yy, xy = covariances(np.random.default_rng(0))
    left, right = canonical_maps(xx, yy, xy, 4)
    assert (left.shape, right.shape) == ((7, 4), (5, 4))
    ridged = [
        c + 0.1 * torch.linalg.eigvalsh(c).mean() * torch.eye(len(c), dtype=c.dtype)
        for c in (xx, yy)
    ]
    scale = (left.T @ ridged[0] @ left).diagonal()
    torch.testing.assert_close(left.T @ ridged[0] @ left, scale.diag())
    torch.testing.assert_close(right.T @ ridged[1] @ right, scale.diag())
    across = left.T @ xy @ right
    # Scaled on both sides by correlation ** 1.5: the ridged covariances are correlation
    # ** 3, across ** 4.
    torch.testing.assert_close(across, (scale ** (4 / 3)).diag())
    assert scale.tolist() == sorted(scale.tolist(), reverse=True)


def test_it_tells_whose_caption_it_is(case):
    """On what it was fitted to: 24 images in 16 dimensions, their words at random."""
    bundle = ModelBundle.load(case.bundle)
    data = case.data
    adapter = trained_part(bundle.adapter)
    reports = []
    fitted = fit_pooled_similarity(
        adapter, bundle.joint, data, 0, 12, lambda *report: reports.append(report[1:])
    )
    assert reports[-1] == (24, 24)
    assert fitted.sizes["dim"] == 12
    captions = [set(data.caption(at)) for at in range(len(data.records))]
    counts = Counter(word for words in captions for word in words)
    frequent = [word for word in sorted(counts) if counts[word] >= MIN_CAPTIONS]
    assert fitted.word_numbers.tolist() == frequent
    with torch.no_grad():
        tokens = adapter(data.blocks(np.arange(data.images)).float()).bfloat16()
    scorer = replace(bundle, pooled=fitted, info=None).scorer
    images = scorer.images(tokens)
    scores = np.stack(
        [
            scorer.parts(["pooled"], [first] * len(tokens), images)["pooled"]
            for first in case.texts()[::2]
        ]
    )
    better = (scores > scores.diagonal()[:, None]).sum(axis=1).mean()
    # by chance 11.5 other images score higher
    assert better < 6
