"""Which candidates the joint encoder scores, and the logit that stands for those that it does not score."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edje_index.scoring.cascade import Cascade
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import ScoreWeights
from storage_formats import UsageError

SCORE = FinalScore.of(ScoreWeights(logit=0.5, late=2.0, embedding=1.0))
NUMBERS = st.floats(-8, 8, width=16)


def values(late, embedding) -> dict[str, np.ndarray]:
    return {"late": np.array(late, dtype=np.float32), "embedding": np.array(embedding, dtype=np.float32)}


def test_the_other_parts_choose():
    parts = values([[0, 1, 3, 0], [5, 0, 0, 0]], [[9, 0, 0, 5], [0, 1, 2, 3]])
    chosen = Cascade(SCORE, 2).chosen(parts, np.arange(4) + np.zeros((2, 1), dtype=np.int64))
    assert chosen.tolist() == [[True, False, True, False], [True, False, False, True]]
    assert Cascade(SCORE, 9).chosen(parts, np.zeros((2, 4), dtype=np.int64)).all()


def test_the_lower_row_wins_a_tie():
    parts = values([1, 1, 1, 1], [0, 0, 0, 0])
    assert Cascade(SCORE, 2).chosen(parts, np.array([7, 3, 9, 4])).tolist() == [False, True, False, True]


@pytest.mark.parametrize(("weight", "expected"), [(0.5, [-2, 4, -2]), (-0.5, [-2, 4, 4])])
def test_a_missing_logit_is_the_worst_of_the_others(weight, expected):
    cascade = Cascade(FinalScore.of(ScoreWeights(logit=weight, late=1.0)), 2)
    completed = cascade.with_every_logit({"logit": np.array([-2, 4, np.nan], np.float32), "late": np.zeros(3)})
    assert completed["logit"].tolist() == expected


def test_no_candidates():
    cascade, nothing = Cascade(SCORE, 2), values([], [])
    assert cascade.chosen(nothing, np.empty(0, np.int64)).shape == (0,)
    assert cascade.with_every_logit({**nothing, "logit": nothing["late"]})["logit"].shape == (0,)


@given(arrays(np.float32, (3, 6), elements=NUMBERS), st.integers(1, 7), st.sampled_from([-0.5, 0.25, 2.0]))
def test_a_candidate_without_a_logit_never_ranks_above_one_with(parts, joint_pool, weight):
    """With exact sums of small numbers."""
    score = FinalScore.of(ScoreWeights(logit=weight, late=1.0, embedding=4.0))
    cascade, (logits, late, embedding) = Cascade(score, joint_pool), np.round(parts)
    chosen = cascade.chosen({"late": late, "embedding": embedding}, np.arange(6))
    known = {"logit": np.where(chosen, logits, np.nan), "late": late, "embedding": embedding}
    final = score.sum(cascade.with_every_logit(known))
    assert chosen.sum() == min(joint_pool, 6)
    np.testing.assert_array_equal(final[chosen], score.sum({**known, "logit": logits})[chosen])
    if not chosen.all():
        assert final[chosen].min() >= final[~chosen].max()


@pytest.mark.parametrize(
    ("weights", "joint_pool", "message"),
    [
        (ScoreWeights(late=1.0), 0, "joint_pool must be an integer of at least 1, got 0"),
        (ScoreWeights(), 5, "joint_pool needs a score with other parts than the logit"),
        (ScoreWeights(logit=0.0, late=1.0), 5, "joint_pool has no effect on a score without the logit"),
    ],
)
def test_a_cascade_without_use_is_refused(weights, joint_pool, message):
    with pytest.raises(UsageError, match=message):
        Cascade(FinalScore.of(weights), joint_pool)
