"""When to write output with non-temporal stores, which bypass the processor's cache.

An ordinary store first reads the memory that it overwrites, and evicts other data from the cache. A non-temporal
store does neither, which makes large gathers faster (docs/lab/storage-io.md). Small outputs, such as the candidates of
one query, should stay in the cache because they are read next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
NONTEMPORAL_FROM = 32 << 20
"""Outputs of at least this many bytes do not fit into the cache of a usual processor."""


def use_nontemporal(total: int, size: int, addresses: NDArray[np.int64] | int) -> bool:
    """Whether to write `total` bytes with non-temporal stores, in pieces of `size` bytes at `addresses`.

    True only for whole cache lines; for other pieces, non-temporal stores gain nothing.
    """
    return total >= NONTEMPORAL_FROM and size % LINE_BYTES == 0 and not np.any(np.asarray(addresses) % LINE_BYTES)
