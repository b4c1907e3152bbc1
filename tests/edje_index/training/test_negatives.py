"""Mining: what is masked, what is drawn, and with which probability."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.training.batches import Sampler, draw_negatives
from storage_formats.errors import UsageError


def draw(similarities, masked, count, temperature, mined, rng):
    return draw_negatives(similarities, masked, 0, count=count, temperature=temperature, mined=mined, rng=rng)


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
    similar = np.array([[9.0, 0.3, 0.1, -0.2]], dtype=np.float32)
    masked = np.array([[True, False, False, False]])
    drawn = np.concatenate([draw(similar, masked, 1, 0.25, 1.0, np.random.default_rng(at))[0] for at in range(4000)])
    expected = np.exp(np.array([0.3, 0.1, -0.2]) / 0.25)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4)[1:] / 4000, expected / expected.sum(), atol=0.03)


@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1))
def test_nothing_masked_is_ever_drawn_and_nothing_twice_while_others_are_left(seed, size, count, temperature, mined):
    rng = np.random.default_rng(seed)
    masked = rng.random((size, size)) < 0.4
    np.fill_diagonal(masked, True)
    masked[np.arange(size), (np.arange(size) + 1) % size] = False
    similar = rng.normal(size=(size, size))
    drawn = draw(similar, masked, count, temperature, mined, np.random.default_rng(seed))
    assert drawn.shape == (size, count)
    part = draw_negatives(
        similar[1:], masked[1:], 1, count=count, temperature=temperature, mined=mined, rng=np.random.default_rng(seed)
    )
    np.testing.assert_array_equal(part, drawn[1:])  # a worker mines only its own rows
    for row in range(size):
        assert not masked[row, drawn[row]].any()
        assert len(set(drawn[row])) == min(count, (~masked[row]).sum())


def test_a_row_without_candidates_is_refused():
    with pytest.raises(UsageError, match=r"raise loop.batch_size"):
        draw(np.zeros((2, 2)), np.ones((2, 2), dtype=bool), 1, 1.0, 1.0, np.random.default_rng(0))
