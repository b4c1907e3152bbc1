"""When to write answers past the cache.

An ordinary store first reads the memory that it is about to overwrite, and pushes out of the cache what may be needed.
A non-temporal one does neither: a large gather of blocks so takes half the time (docs/architecture.md). What is read
again at once, as the answer to one query, is better left in the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
STREAM_FROM = 32 << 20
"""Bytes of an answer that no usual processor's cache holds."""


def streams(total: int, size: int, addresses: NDArray[np.int64] | int) -> bool:
    """Whether `total` bytes are written past the cache, in pieces of `size` bytes at `addresses`.

    Only whole lines of the cache can be: elsewhere ordinary stores are as good.
    """
    return total >= STREAM_FROM and size % LINE_BYTES == 0 and not np.any(np.asarray(addresses) % LINE_BYTES)
