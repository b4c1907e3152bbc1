"""Mining: what is masked, and what is chosen."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.training.batches import hard_negatives
from storage_formats.errors import UsageError
from storage_formats.reading.embeddings import read_embeddings


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 3])
def test_negatives_are_the_top_k_of_the_published_sampling(case, seed, count):
    """Plain Python in float64: rank the batch by softmax of the similarities
    without the anchor's own pairs.
    """
    source = case.source(negatives__count=count, loop__seed=seed, loop__batch_size=12)
    # each photo has two images
    data = replace(source.data, photos=source.data.photos // 2)
    source = replace(source, data=data)
    images, captions = source.pairs(seed)
    drawn = source.negatives(images, captions)
    texts, photos = (
        array.astype(np.float64).tolist()
        for array in (
            data.records["embedding"][captions],
            read_embeddings(data.index, data.rows[images]),
        )
    )
    scores = [
        [sum(map(operator.mul, text, photo)) for photo in photos] for text in texts
    ]
    keys = data.records["key"][captions]
    for direction, matrix in (
        (0, scores),
        (1, [list(column) for column in zip(*scores, strict=True)]),
    ):
        for anchor, row in enumerate(matrix):
            total = sum(math.exp(value) for value in row)
            allowed = [
                (-math.exp(value) / total, other)
                for other, value in enumerate(row)
                if data.photos[images[other]] != data.photos[images[anchor]]
                and keys[other] != keys[anchor]
            ]
            assert drawn[direction][anchor].tolist() == [
                other for _, other in sorted(allowed)[:count]
            ]


@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 6))
def test_nothing_masked_is_chosen_and_nothing_twice_while_others_are_left(
    seed, size, count
):
    rng = np.random.default_rng(seed)
    masked = rng.random((size, size)) < 0.4
    np.fill_diagonal(masked, True)
    masked[np.arange(size), (np.arange(size) + 1) % size] = False
    # with ties
    similar = rng.integers(0, 5, size=(size, size)).astype(float)
    chosen = hard_negatives(similar, masked, count)
    for row in range(size):
        order = sorted(
            np.flatnonzero(~masked[row]).tolist(),
            key=lambda other, row=row: (-similar[row, other], other),
        )
        assert chosen[row].tolist() == [
            order[place % len(order[:count])] for place in range(count)
        ]


def test_a_row_without_candidates_is_refused():
    with pytest.raises(UsageError, match=r"raise loop.batch_size"):
        hard_negatives(np.zeros((2, 2)), np.ones((2, 2), dtype=bool), 1)
