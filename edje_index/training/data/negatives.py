"""Hard-negative mining within a batch, by the similarities of an embedding model.

A batch spans all workers. Each worker draws the negatives of the whole batch, so that workers need not communicate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError

Similarities = NDArray[np.floating[Any]]


def negative_mask(image_keys: NDArray[np.int64], caption_keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which pairs of a batch cannot be negatives of each other, a symmetric matrix, bool [b, b].

    These are pairs with the same image, or with captions of the same words.

    Args:
        image_keys: number of the image of each pair, int64 [b]. Equal numbers mean the same image.
        caption_keys: number of the caption of each pair, int64 [b]. Equal numbers mean the same words.
    """
    masked: NDArray[np.bool_] = (image_keys[:, None] == image_keys) | (caption_keys[:, None] == caption_keys)
    return masked


def draw_negatives(
    similarities: Similarities,
    masked: NDArray[np.bool_],
    *,
    count: int,
    temperature: float,
    mined: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Draw `count` negatives for each row of `similarities`. Return the column numbers, int64 [b, count].

    The probabilities are softmax(similarity / temperature) over the columns that are not masked. With probability
    1 - `mined`, all negatives of a row are drawn uniformly. If a row has fewer than `count` unmasked columns,
    columns are repeated.

    Args:
        similarities: similarity of each query with every candidate of the batch [b, c].
        masked: which candidates cannot be negatives of each query, bool [b, c].
        count: number of negatives per row.
        temperature: temperature of the softmax, at least 0; 0 selects the `count` most similar candidates.
        mined: probability that the negatives of a row are mined, between 0 and 1.
        rng: random number generator.

    Raises:
        UsageError: all candidates of a row are masked.
    """
    free = (~masked).sum(axis=1)
    if not free.all():
        raise UsageError(
            "a pair has no possible negative, because all other pairs of its batch have the same image "
            "or the same words; raise loop.batch_size"
        )
    # Gumbel top-k: the largest values of log-weight + noise are a draw without replacement. Both terms are multiplied
    # by the temperature, so that a temperature of 0 is allowed.
    noise = rng.gumbel(size=similarities.shape)
    random_rows = rng.random(len(similarities)) >= mined
    keys = similarities + temperature * noise
    keys[random_rows] = noise[random_rows]
    order = np.argsort(np.where(masked, np.inf, -keys), axis=1, kind="stable")
    positions = np.arange(count) % np.minimum(free, count)[:, None]
    drawn: NDArray[np.int64] = np.take_along_axis(order, positions, axis=1)
    return drawn


def mined_share(step: int, curriculum_steps: int) -> float:
    """Return the probability that negatives are mined at `step`.

    The probability grows linearly from 0 to 1 over `curriculum_steps` steps. If `curriculum_steps` is 0, the
    probability is 1.
    """
    return min(1.0, step / curriculum_steps) if curriculum_steps else 1.0
