"""Agreement of tokens and rankings, against SciPy and by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.evaluation.quantization_report.distribution import Distribution
from edje_index.evaluation.quantization_report.queries import GENERIC_CAPTIONS, read_queries
from edje_index.evaluation.quantization_report.rankings import compare_rankings, kendall_tau, overlap
from edje_index.evaluation.quantization_report.token_errors import TokenErrorMeter, compare_tokens
from storage_formats.errors import UsageError

BF16 = ml_dtypes.bfloat16
SCORES = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=30)


@settings(deadline=None)  # SciPy is imported on the way
@given(SCORES)
def test_kendall_tau_is_that_of_scipy(pairs):
    from scipy.stats import kendalltau

    left, right = np.array(pairs, dtype=np.float32).T
    expected = kendalltau(left, right).statistic
    if np.isnan(expected):  # one of them has no order
        expected = float(len(set(left)) == len(set(right)))
    assert kendall_tau(left, right) == pytest.approx(expected, abs=1e-12)


def test_rankings_by_hand():
    reference = [np.array([3, 2, 1, 0], np.float32), np.array([0, 1, 2, 3], np.float32)]
    other = [np.array([3, 2, 1, 0.5], np.float32), np.array([0, 1, 3, 2], np.float32)]
    found = compare_rankings(reference, other)
    assert (found.queries, found.top1_kept, found.overlap_at_10) == (2, 0.5, 1.0)
    assert found.kendall_tau.lowest == pytest.approx(1 - 2 / 6)
    assert found.kendall_tau.highest == 1
    assert found.score_change == pytest.approx((0.125 + 0.5) / 2)
    assert found.score_change_relative == pytest.approx(found.score_change / np.std([0, 1, 2, 3]))


def test_scores_without_order_have_no_relative_change():
    flat = np.zeros(3, np.float32)
    found = compare_rankings([flat], [flat + 1])
    assert (found.kendall_tau.mean, found.score_change, found.score_change_relative) == (1, 1, 0)
    assert kendall_tau(flat, np.arange(3, dtype=np.float32)) == 0


def test_overlap_counts_the_best_and_keeps_the_order_of_equal_scores():
    left = np.arange(20, 0, -1).astype(np.float32)
    right = left.copy()
    right[[9, 10]] = right[[10, 9]]
    assert overlap(left, right, 10) == 0.9
    assert overlap(left, np.zeros(20, np.float32), 10) == 1
    assert overlap(left[:3], -left[:3], 10) == 1


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_errors_of_tokens_do_not_depend_on_their_magnitude(seed, scale):
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((3, 4, 16))
    noise = rng.standard_normal(left.shape) * 0.1
    a, b = (left * scale).astype(BF16), ((left + noise) * scale).astype(BF16)
    errors, cosines = compare_tokens(a, b)
    exact_a, exact_b = a.astype(np.float64).reshape(12, 16), b.astype(np.float64).reshape(12, 16)
    lengths = np.linalg.norm(exact_a, axis=1)
    np.testing.assert_allclose(errors, np.linalg.norm(exact_b - exact_a, axis=1) / lengths, rtol=1e-5)
    expected = (exact_a * exact_b).sum(axis=1) / lengths / np.linalg.norm(exact_b, axis=1)
    np.testing.assert_allclose(cosines, expected, atol=1e-6)


def test_the_meter_leaves_out_tokens_without_length_and_counts_them():
    blocks = np.ones((2, 2, 8), dtype=BF16)
    blocks[0, 0] = 0
    other = blocks.copy()
    other[1, 1] = 0
    other[1, 0] *= BF16(-1)
    meter = TokenErrorMeter()
    meter.add(blocks[:1], other[:1])
    meter.add(blocks[1:], other[1:])
    found = meter.result()
    assert (found.tokens, found.zero_tokens, found.cosine.count) == (4, 1, 3)
    assert (found.relative_error.lowest, found.relative_error.p50, found.relative_error.highest) == (0, 1, 2)
    assert (found.cosine.lowest, found.cosine.p50, found.cosine.highest) == (-1, 0, 1)
    empty = TokenErrorMeter()
    assert empty.result() is None
    empty.add(np.zeros((1, 2, 8), BF16), np.ones((1, 2, 8), BF16))
    assert empty.result() is None


def test_distribution():
    found = Distribution.of(np.arange(101, dtype=np.float32))
    assert (found.count, found.mean, found.lowest, found.highest) == (101, 50, 0, 100)
    assert (found.p1, found.p5, found.p50, found.p95, found.p99) == (1, 5, 50, 95, 99)


def test_queries_of_both_kinds_of_file(tmp_path):
    lines = tmp_path / "q.txt"
    lines.write_text("a dog\n\n  a cat \na dog\n")
    assert read_queries(lines) == ["a dog", "a cat"]
    objects = tmp_path / "q.jsonl"
    objects.write_text(
        '{"caption": "one"}\n"two"\n\n{"image": "x.jpg", "captions": ["three", "one"]}\n{"query": "four"}\n'
    )
    assert read_queries(objects) == ["one", "two", "three", "four"]
    assert len(set(GENERIC_CAPTIONS)) == 24


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no query"), ('{"image": "x"}\n', "line 1: "), ('"a"\nnot json\n', "line 2: "), ("[1]\n", "line 1: ")],
)
def test_unusable_queries(tmp_path, text, words):
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_queries(path)
    with pytest.raises(UsageError, match="cannot read queries"):
        read_queries(tmp_path / "absent.txt")
