"""A cache of values of images that every query needs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# at most 48 MB with the shipped model; unused slots take no memory
_SLOTS = 1 << 15


class TermCache:
    """Keeps one float32 vector per row. Thread-safe.

    A row has one slot, so a look-up of 100 rows takes microseconds. Rows that share a
    slot displace each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = np.full(_SLOTS, -1, dtype=np.int64)
        self._values: Floats | None = None

    def terms(
        self, rows: NDArray[np.int64], compute: Callable[[NDArray[np.bool_]], Floats]
    ) -> Floats:
        """Return the vectors of `rows` [k], float32 [k, w]. `compute(mask)` returns
        those that are not in the cache.
        """
        slots = rows % _SLOTS
        with self._lock:
            missing = self._rows[slots] != rows
            values = None if self._values is None else self._values[slots]
        if values is not None and not missing.any():
            return values
        computed = compute(missing)
        values = (
            np.empty((len(rows), computed.shape[1]), dtype=np.float32)
            if values is None
            else values
        )
        values[missing] = computed
        with self._lock:
            if self._values is None:
                self._values = np.empty((_SLOTS, computed.shape[1]), dtype=np.float32)
            self._rows[slots] = rows
            self._values[slots] = values
        return values
