"""Random numbers of a training run. Each purpose has its own stream, seeded by
[seed, purpose, ...].
"""

from __future__ import annotations

import numpy as np

ORDER, MASKING, DROPOUT, CLUSTERING, VIEWS, VIEW_CHOICE, POOLING = range(7)


def stream(seed: int, purpose: int, *position: int) -> np.random.Generator:
    """Return a random number generator that depends only on the arguments.

    `purpose` is a constant of this module, such as `MASKING`. `position` is, for
    example, a batch number and a rank.
    """
    return np.random.default_rng([seed, purpose, *position])
