"""Hard negatives from within a batch, mined by an embedding model.

The batch is the whole one, over all workers. Which pairs it holds follows from (seed, step) alone and the embeddings
are at hand everywhere, so that every worker sees what a gather would give it, without one, and may look ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError

Similarities = NDArray[np.floating[Any]]


def negative_mask(image_keys: NDArray[np.int64], caption_keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pairs (caption i, image j) of a batch are certainly no negatives -> [b, b], symmetric.

    Those of one image, whichever of its captions, and those whose captions have the same words.

    Args:
        image_keys: [b], equal for the same image.
        caption_keys: [b], equal for the same text.
    """
    masked: NDArray[np.bool_] = (image_keys[:, None] == image_keys) | (caption_keys[:, None] == caption_keys)
    return masked


def draw_negatives(
    similarities: Similarities,
    masked: NDArray[np.bool_],
    count: int,
    temperature: float,
    mined: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """`count` negatives for each row -> int64 [b, count], columns of `similarities`.

    Drawn without replacement with probabilities softmax(similarity / temperature) over what is not masked; a
    temperature of 0 takes the `count` most similar. With probability 1 - `mined` a row draws uniformly instead. Where
    fewer than `count` are left after masking, they are taken again in turn.

    Args:
        similarities: [b, c], of each anchor with every candidate of the batch.
        masked: [b, c].
        count: k.
        temperature: not negative.
        mined: between 0 and 1.
        rng: the only source of chance.

    Raises:
        UsageError: a row has no candidate at all.
    """
    free = (~masked).sum(axis=1)
    if not free.all():
        raise UsageError("a batch holds nothing but copies of one image or caption: raise --batch-size")
    # Gumbel top-k: the largest of log-weight + noise are a draw without replacement. Here all times the temperature.
    noise = rng.gumbel(size=similarities.shape)
    random_rows = rng.random(len(similarities)) >= mined
    keys = similarities + temperature * noise
    keys[random_rows] = noise[random_rows]
    order = np.argsort(np.where(masked, np.inf, -keys), axis=1, kind="stable")
    places = np.arange(count) % np.minimum(free, count)[:, None]
    drawn: NDArray[np.int64] = np.take_along_axis(order, places, axis=1)
    return drawn


def mined_share(step: int, curriculum: int) -> float:
    """Probability that a row's negatives are mined: 0 to 1 over the first `curriculum` steps; 1 without any."""
    return min(1.0, step / curriculum) if curriculum else 1.0
