"""The sum itself: on arrays, on tensors with gradients, and without computing parts of weight 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Pairs, reads_tokens
from edje_index.scoring.weights import PART_NAMES, ScoreWeights
from tests.edje_index.scoring.bundles import WEIGHTS


def random_parts(shape=(4, 3)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {part: rng.standard_normal(shape).astype(np.float32) for part in PART_NAMES}


def test_arrays_and_tensors_are_summed_alike():
    parts = random_parts()
    by_part = WEIGHTS.t2i.by_part()
    expected = sum(by_part[part] * parts[part].astype(np.float64) for part in PART_NAMES)
    total = FinalScore.of(WEIGHTS.t2i).sum(parts)
    assert total.dtype == np.float32
    np.testing.assert_allclose(total, expected, atol=1e-5)
    tensors = {part: torch.from_numpy(values) for part, values in parts.items()}
    np.testing.assert_allclose(FinalScore.of(WEIGHTS.t2i).sum(tensors).numpy(), expected, atol=1e-5)


def test_the_gradient_of_a_weight_is_its_part():
    parts = {part: torch.from_numpy(values).double() for part, values in random_parts().items()}
    weights = {part: torch.tensor(0.0, dtype=torch.float64, requires_grad=True) for part in parts}
    FinalScore(weights).sum(parts).sum().backward()
    for part, weight in weights.items():
        torch.testing.assert_close(weight.grad, parts[part].sum())


class Counted:
    """A part that counts how often it is computed."""

    def __init__(self) -> None:
        self.calls = 0

    def of(self, pairs: Pairs) -> np.ndarray:
        self.calls += 1
        return np.ones(len(pairs.captions), dtype=np.float32)


def test_parts_of_weight_zero_are_not_computed():
    parts = {part: Counted() for part in PART_NAMES}
    score = FinalScore.of(ScoreWeights(logit=0.0, late=2.0, hubness=1.0))
    values = score.compute(parts, Pairs(["a", "b"]))
    assert score.sum(values).tolist() == [3.0, 3.0]
    assert {part for part, counted in parts.items() if counted.calls} == {"late", "hubness"} == set(values)


def test_a_share_of_the_score_keeps_its_weights():
    parts = random_parts()
    joint = FinalScore.of(WEIGHTS.t2i).only(["logit", "late"])
    np.testing.assert_allclose(joint.sum(parts), parts["logit"] + 0.75 * parts["late"], atol=1e-6)
    assert FinalScore.of(ScoreWeights(logit=0, embedding=1)).only(["logit", "late"]).parts == ()


def test_a_sum_of_nothing_is_refused():
    with pytest.raises(ValueError, match="other than 0"):
        FinalScore.of(ScoreWeights(logit=0.0)).sum(random_parts())


@pytest.mark.parametrize(
    ("parts", "direction", "expected"),
    [
        (["embedding"], "t2i", False),
        (["embedding", "hubness"], "i2t", False),
        (["embedding", "hubness"], "t2i", True),
        (["logit"], "i2t", True),
    ],
)
def test_which_scores_read_tokens(parts, direction, expected):
    assert reads_tokens(parts, direction) is expected
