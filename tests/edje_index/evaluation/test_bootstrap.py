"""Intervals against SciPy's bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from edje_index.evaluation.bootstrap import ClusterBootstrap

RNG = np.random.default_rng(5)
CLUSTERS = RNG.integers(0, 40, 150) * 7
HITS = (RNG.random((150, 3)) < [0.2, 0.5, 0.55]).astype(float)


def scipy_interval(values: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """Of the ratio of two sums over clusters, which is the mean over their members."""
    labels = np.unique(CLUSTERS)
    sums = np.array([values[label == CLUSTERS].sum() for label in labels])
    counts = np.array([(label == CLUSTERS).sum() for label in labels])
    found = stats.bootstrap(
        (sums, counts),
        lambda left, right, axis=-1: left.sum(axis=axis) / right.sum(axis=axis),
        n_resamples=resamples,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return found.confidence_interval.low, found.confidence_interval.high


def test_intervals_are_those_of_scipy_on_the_same_draws():
    for column, estimate in enumerate(ClusterBootstrap(CLUSTERS, 500, 3).estimates(HITS)):
        assert estimate.value == pytest.approx(HITS[:, column].mean())
        assert (estimate.low, estimate.high) == pytest.approx(scipy_interval(HITS[:, column], 500, 3))


def test_a_difference_is_paired():
    bootstrap = ClusterBootstrap(CLUSTERS, 400, 1)
    difference = bootstrap.estimates(HITS[:, 1:2] - HITS[:, :1])[0]
    means = bootstrap.means(HITS)
    assert (difference.low, difference.high) == pytest.approx(
        tuple(np.percentile(means[:, 1] - means[:, 0], [2.5, 97.5]))
    )
    same = bootstrap.estimates(HITS[:, :1] - HITS[:, :1])[0]
    assert (same.low, same.value, same.high) == (0, 0, 0)


def test_draws_do_not_depend_on_the_chunks(monkeypatch):
    whole = ClusterBootstrap(CLUSTERS, 101, 2).means(HITS)
    monkeypatch.setattr("edje_index.evaluation.bootstrap._CHUNK_DRAWS", 300)
    np.testing.assert_allclose(ClusterBootstrap(CLUSTERS, 101, 2).means(HITS), whole, rtol=1e-12)
    assert not np.allclose(ClusterBootstrap(CLUSTERS, 101, 3).means(HITS), whole)


def test_captions_of_one_image_are_drawn_together():
    """Five equal answers an image: an interval that took them for independent would be far too narrow."""
    values = np.repeat(RNG.random(60) < 0.5, 5).astype(float)[:, None]
    clustered = ClusterBootstrap(np.repeat(np.arange(60), 5), 2000).estimates(values)[0]
    single = ClusterBootstrap(np.arange(60), 2000).estimates(values[::5])[0]
    assert (clustered.low, clustered.high) == pytest.approx((single.low, single.high))


def test_no_resamples_no_interval():
    estimate = ClusterBootstrap(CLUSTERS, 0).estimates(HITS)[0]
    assert (estimate.low, estimate.high) == (None, None)
