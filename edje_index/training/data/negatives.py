"""Hard-negative mining within a batch, by the similarities of an embedding model.

The batch spans all workers. Its pairs follow from (seed, step) and every worker has all embeddings. So each worker
computes the negatives of the whole batch without communication, and can prepare batches ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError

Similarities = NDArray[np.floating[Any]]


def negative_mask(image_keys: NDArray[np.int64], caption_keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pairs (caption i, image j) of a batch that cannot be negatives -> [b, b], symmetric.

    These are pairs of the same image, with any of its captions, and pairs whose captions have the same words.

    Args:
        image_keys: [b], equal for the same image.
        caption_keys: [b], equal for the same text.
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
    """Draw `count` negatives for each row -> int64 [b, count], columns of `similarities`.

    Negatives are drawn without replacement with probabilities softmax(similarity / temperature) over the columns that
    are not masked. With probability 1 - `mined` a row draws uniformly instead. If fewer than `count` columns are left,
    they repeat in turn.

    Args:
        similarities: of each anchor with every candidate of the batch [b, c].
        masked: columns that cannot be negatives [b, c].
        count: k.
        temperature: not negative; 0 takes the `count` most similar.
        mined: between 0 and 1.
        rng: the only source of randomness.

    Raises:
        UsageError: a row has no candidate.
    """
    free = (~masked).sum(axis=1)
    if not free.all():
        raise UsageError("a batch holds only copies of one image or caption; raise loop.batch_size")
    # Gumbel top-k: the largest of log-weight + noise are a draw without replacement. Everything is scaled by the
    # temperature, so that 0 is allowed.
    noise = rng.gumbel(size=similarities.shape)
    random_rows = rng.random(len(similarities)) >= mined
    keys = similarities + temperature * noise
    keys[random_rows] = noise[random_rows]
    order = np.argsort(np.where(masked, np.inf, -keys), axis=1, kind="stable")
    positions = np.arange(count) % np.minimum(free, count)[:, None]
    drawn: NDArray[np.int64] = np.take_along_axis(order, positions, axis=1)
    return drawn


def mined_share(step: int, curriculum_steps: int) -> float:
    """Probability that a row's negatives are mined: grows from 0 to 1 over `curriculum_steps`; 1 if that is 0."""
    return min(1.0, step / curriculum_steps) if curriculum_steps else 1.0
