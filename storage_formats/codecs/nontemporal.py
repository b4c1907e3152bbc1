"""The decision when to write output with non-temporal stores, which bypass the processor's cache.

An ordinary store first reads the memory that it overwrites, and evicts other data from the cache. A non-temporal
store does neither, which makes large reads faster (docs/lab/storage-io.md). Small outputs, such as the candidates of
one query, should stay in the cache because they are read next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
NONTEMPORAL_FROM = 32 << 20
"""Outputs of this many bytes or more are written with non-temporal stores. They exceed most processors' caches."""


def use_nontemporal(total: int, size: int, addresses: NDArray[np.int64] | int) -> bool:
    """Return True if an output of `total` bytes should be written with non-temporal stores.

    The output consists of pieces of `size` bytes at `addresses`. Non-temporal stores are faster only if the output is
    large and each piece consists of whole cache lines.
    """
    return total >= NONTEMPORAL_FROM and size % LINE_BYTES == 0 and not np.any(np.asarray(addresses) % LINE_BYTES)
