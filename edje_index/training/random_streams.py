"""Makes the random number generators of a training run. Each purpose has its own random
numbers, which do not depend on how many numbers other purposes draw.
"""

from __future__ import annotations

import numpy as np

ORDER, MASKING, DROPOUT, CLUSTERING = range(4)
POOLING = 6


def stream(seed: int, purpose: int, *position: int) -> np.random.Generator:
    """Return a random number generator that depends only on the arguments.

    `purpose` is a constant of this module, such as `MASKING`. `position` are numbers
    that select one generator of this purpose, for example a batch number and a rank.
    """
    return np.random.default_rng([seed, purpose, *position])
