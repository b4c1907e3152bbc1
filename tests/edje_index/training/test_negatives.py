"""Mining: what is masked, what is drawn, and with which probability."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.training.data.negatives import draw_negatives, mined_share, negative_mask
from edje_index.training.data.sampling import Sampler
from storage_formats.errors import UsageError


def draw(similarities, masked, count, temperature, mined, rng):
    return draw_negatives(similarities, masked, count=count, temperature=temperature, mined=mined, rng=rng)


def test_the_same_image_and_the_same_caption_are_masked():
    masked = negative_mask(np.array([5, 5, 6, 7]), np.array([0, 1, 2, 0]))
    assert masked.tolist() == [
        [True, True, False, True],
        [True, True, False, False],
        [False, False, True, False],
        [True, False, False, True],
    ]


def test_temperature_zero_takes_the_most_similar():
    similar = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    drawn = draw(similar, np.eye(6, dtype=bool), 3, 0.0, 1.0, np.random.default_rng(1))
    for row, columns in enumerate(drawn):
        others = [at for at in np.argsort(-similar[row]) if at != row]
        assert columns.tolist() == others[:3]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 3])
def test_negatives_are_the_top_k_of_the_published_sampling(case, seed, count):
    """Plain Python in float64: rank the batch by softmax of the similarities without the anchor's own pairs."""
    source = case.source(negatives__count=count, loop__seed=seed, loop__batch_size=12)
    source = replace(source, temperature=0.0)
    data = source.data
    images, captions = Sampler(data, 12, seed).pairs(seed)
    drawn = source.negatives(seed, images, captions)
    texts, photos = (array.astype(np.float64).tolist() for array in (data.text_mining, data.image_mining))
    scores = [[sum(map(operator.mul, texts[c], photos[i])) for i in images] for c in captions]
    for direction, matrix in ((0, scores), (1, [list(column) for column in zip(*scores, strict=True)])):
        for anchor, row in enumerate(matrix):
            total = sum(math.exp(value) for value in row)
            allowed = [
                (-math.exp(value) / total, other)
                for other, value in enumerate(row)
                if data.rows[images[other]] != data.rows[images[anchor]]
                and data.caption_keys[captions[other]] != data.caption_keys[captions[anchor]]
            ]
            assert drawn[direction][anchor].tolist() == [other for _, other in sorted(allowed)[:count]]


def test_draws_follow_the_softmax_of_the_similarities():
    similar = np.tile(np.array([[9.0, 0.3, 0.1, -0.2]], dtype=np.float32), (40000, 1))
    masked = np.tile([[True, False, False, False]], (40000, 1))
    drawn = draw(similar, masked, 1, 0.25, 1.0, np.random.default_rng(0))[:, 0]
    expected = np.exp(np.array([0.3, 0.1, -0.2]) / 0.25)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4)[1:] / 40000, expected / expected.sum(), atol=0.01)


def test_without_mining_draws_are_uniform():
    similar = np.tile(np.array([[0.0, 50.0, 0.0]], dtype=np.float32), (30000, 1))
    drawn = draw(similar, np.zeros((30000, 3), dtype=bool), 1, 0.1, 0.0, np.random.default_rng(0))[:, 0]
    np.testing.assert_allclose(np.bincount(drawn) / 30000, 1 / 3, atol=0.01)


def test_part_of_the_rows_is_mined():
    similar = np.tile(np.array([[0.0, 50.0, 0.0, 0.0]], dtype=np.float32), (20000, 1))
    drawn = draw(similar, np.zeros((20000, 4), dtype=bool), 1, 0.1, 0.6, np.random.default_rng(0))[:, 0]
    assert (drawn == 1).mean() == pytest.approx(0.6 + 0.4 / 4, abs=0.01)


@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1))
def test_nothing_masked_is_ever_drawn_and_nothing_twice_while_others_are_left(seed, size, count, temperature, mined):
    rng = np.random.default_rng(seed)
    masked = rng.random((size, size)) < 0.4
    np.fill_diagonal(masked, True)
    masked[np.arange(size), (np.arange(size) + 1) % size] = False
    drawn = draw(rng.normal(size=(size, size)), masked, count, temperature, mined, rng)
    assert drawn.shape == (size, count)
    for row in range(size):
        assert not masked[row, drawn[row]].any()
        assert len(set(drawn[row])) == min(count, (~masked[row]).sum())


def test_a_row_without_candidates_is_refused():
    with pytest.raises(UsageError, match=r"raise loop.batch_size"):
        draw(np.zeros((2, 2)), np.ones((2, 2), dtype=bool), 1, 1.0, 1.0, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("step", "curriculum", "share"), [(0, 0, 1), (0, 10, 0), (5, 10, 0.5), (10, 10, 1), (99, 10, 1)]
)
def test_the_curriculum_grows_linearly(step, curriculum, share):
    assert mined_share(step, curriculum) == share
