"""The weighted sum of the parts, which candidates the joint encoder scores, and the
spelling of weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edje_index.scoring.weights import (
    PART_NAMES,
    ScoreWeights,
    parse_score,
    relevance,
)
from tests.edje_index.scoring.bundles import WEIGHTS

NUMBERS = st.floats(-8, 8, width=16)


def random_parts(shape=(4, 3)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {part: rng.standard_normal(shape).astype(np.float32) for part in PART_NAMES}


def test_arrays_and_tensors_are_summed_alike():
    parts = random_parts()
    weights = WEIGHTS.t2i.by_part()
    expected = sum(
        weights[part] * parts[part].astype(np.float64) for part in PART_NAMES
    )
    total = WEIGHTS.t2i.sum(parts)
    assert total.dtype == np.float32
    np.testing.assert_allclose(total, expected, atol=1e-5)
    tensors = {part: torch.from_numpy(values) for part, values in parts.items()}
    np.testing.assert_allclose(WEIGHTS.t2i.sum(tensors).numpy(), expected, atol=1e-5)
    joint = WEIGHTS.t2i.only(["logit", "late"])
    np.testing.assert_allclose(
        joint.sum(parts), parts["logit"] + 0.75 * parts["late"], atol=1e-6
    )
    assert ScoreWeights(logit=0, embedding=1).only(["logit", "late"]).parts == ()
    with pytest.raises(ValueError, match="other than 0"):
        ScoreWeights(logit=0.0).sum(parts)


def test_relevance_follows_the_order_of_the_scores():
    scores = np.sort(
        np.concatenate([np.linspace(-1, 1, 9), [-1e6, -40, 40, 1e6]])
    ).astype(np.float32)
    for weights in (
        ScoreWeights(),
        ScoreWeights(late=3.0),
        ScoreWeights(calibration=(0.5, -2.0)),
    ):
        rated = relevance(scores, weights)
        assert ((rated >= 0) & (rated <= 1)).all()
        assert (np.diff(rated) >= 0).all()
    assert relevance(np.array([2.0]), ScoreWeights()) == pytest.approx(
        1 / (1 + np.exp(-2))
    )
    assert relevance(
        np.array([2.0, -2.0]), ScoreWeights(logit=0, embedding=2)
    ) == pytest.approx([1, 0])
    with pytest.raises(ValueError, match="must be positive"):
        ScoreWeights(calibration=(0.0, 1.0))


@given(
    arrays(np.float32, (3, 6), elements=NUMBERS),
    st.integers(1, 7),
    st.sampled_from([-0.5, 0.25, 2.0]),
)
def test_the_first_hits_are_found_without_the_logits_of_the_others(parts, k, weight):
    """With exact sums of small numbers."""
    score = ScoreWeights(logit=weight, late=1.0, embedding=4.0)
    logit, late, embedding = np.round(parts)
    final = score.sum({"logit": logit, "late": late, "embedding": embedding})
    others = {"late": late, "embedding": embedding}
    mask = score.may_be_first(others, k, (logit.min(), logit.max()))
    assert set(np.flatnonzero(final >= np.sort(final)[-min(k, 6)])) <= set(
        np.flatnonzero(mask)
    )
    assert mask.sum() >= min(k, 6)
    best = np.sort(late + 4 * embedding)[-min(k, 6)]
    np.testing.assert_array_equal(
        score.may_be_first(others, k, (1.0, 1.0)),
        (late + 4 * embedding >= best) | (k > 6),
    )


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("logit", {"logit": 1}),
        ("late=2.5", {"late": 2.5}),
        (
            "logit=1, embedding = 20 ,late=0.5",
            {"logit": 1, "embedding": 20, "late": 0.5},
        ),
    ],
)
def test_parts_that_are_not_named_have_no_weight(score, expected):
    weights = parse_score(score, WEIGHTS.t2i)
    assert weights.by_part() == expected
    assert parse_score("bundle", WEIGHTS.i2t) == WEIGHTS.i2t
    assert parse_score(WEIGHTS.t2i, WEIGHTS.i2t) == WEIGHTS.t2i
