"""Decides when to write output with non-temporal stores, which bypass the processor's cache.

Non-temporal stores make large reads faster. Small outputs are written through the cache, because they are read next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
NONTEMPORAL_FROM = 32 << 20
"""Minimum size in bytes of an output for non-temporal stores. It is larger than the caches of most processors."""


def use_nontemporal(total: int, size: int, addresses: NDArray[np.int64] | int) -> bool:
    """Return True if an output of `total` bytes should be written with non-temporal stores.

    The output consists of pieces, each `size` bytes long. `addresses` contains the start address of each piece.
    """
    return total >= NONTEMPORAL_FROM and size % LINE_BYTES == 0 and not np.any(np.asarray(addresses) % LINE_BYTES)
