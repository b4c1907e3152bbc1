"""Agreement of tokens and rankings, against SciPy and by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.evaluation.quantization import (
    Distribution,
    compare_rankings,
    compare_tokens,
    kendall_tau,
)

BF16 = ml_dtypes.bfloat16
SCORES = st.lists(
    st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=30
)


@given(SCORES)
def test_kendall_tau_compares_the_order_of_each_pair(pairs):
    left, right = np.array(pairs, dtype=np.float32).T
    signs = [
        np.sign(np.subtract.outer(scores, scores)).ravel() for scores in (left, right)
    ]
    ordered = np.sqrt(np.abs(signs[0]).sum() * np.abs(signs[1]).sum())
    expected = (
        (signs[0] @ signs[1]) / ordered if ordered else float(np.array_equal(*signs))
    )
    assert kendall_tau(left, right) == pytest.approx(expected, abs=1e-6)


def test_rankings_by_hand():
    reference = [np.array([3, 2, 1, 0], np.float32), np.array([0, 1, 2, 3], np.float32)]
    other = [np.array([3, 2, 1, 0.5], np.float32), np.array([0, 1, 3, 2], np.float32)]
    found = compare_rankings(reference, other)
    assert (found.queries, found.top1_kept, found.overlap_at_10) == (2, 0.5, 1.0)
    assert found.kendall_tau.lowest == pytest.approx(1 - 2 / 6)
    assert found.kendall_tau.highest == 1
    assert found.score_change == pytest.approx((0.125 + 0.5) / 2)
    assert found.score_change_relative == pytest.approx(
        found.score_change / np.std([0, 1, 2, 3])
    )
    flat = np.zeros(3, np.float32)
    without_order = compare_rankings([flat], [flat + 1])
    assert (without_order.kendall_tau.mean, without_order.score_change_relative) == (
        1,
        0,
    )


def test_overlap_counts_the_best_and_keeps_the_order_of_equal_scores():
    left = np.arange(20, 0, -1).astype(np.float32)
    right = left.copy()
    right[[9, 10]] = right[[10, 9]]
    assert compare_rankings([left], [right]).overlap_at_10 == 0.9
    assert compare_rankings([left], [np.zeros(20, np.float32)]).overlap_at_10 == 1
    assert compare_rankings([left[:3]], [-left[:3]]).overlap_at_10 == 1


@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_errors_of_tokens_do_not_depend_on_their_magnitude(seed, scale):
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((3, 4, 16))
    noise = rng.standard_normal(left.shape) * 0.1
    a = (left * scale).astype(BF16)
    b = ((left + noise) * scale).astype(BF16)
    errors, cosines = compare_tokens(a, b)
    exact_a = a.astype(np.float64).reshape(12, 16)
    exact_b = b.astype(np.float64).reshape(12, 16)
    lengths = np.linalg.norm(exact_a, axis=1)
    np.testing.assert_allclose(
        errors, np.linalg.norm(exact_b - exact_a, axis=1) / lengths, rtol=1e-5
    )
    expected = (
        (exact_a * exact_b).sum(axis=1) / lengths / np.linalg.norm(exact_b, axis=1)
    )
    np.testing.assert_allclose(cosines, expected, atol=1e-6)


def test_tokens_without_length_are_left_out():
    blocks = np.ones((2, 2, 8), dtype=BF16)
    blocks[0, 0] = 0
    other = blocks.copy()
    other[1, 1] = 0
    other[1, 0] *= BF16(-1)
    errors, cosines = compare_tokens(blocks, other)
    assert (errors.tolist(), cosines.tolist()) == ([0, 2, 1], [1, -1, 0])
    found = Distribution.of(cosines)
    assert (found.count, found.lowest, found.p50, found.highest) == (3, -1, 0, 1)
    assert (found.p5, found.p95) == pytest.approx((-0.9, 0.9))
