"""Decides for each shard whether to read directly or through the page cache.

Direct reads are fastest for blocks that are read once. Later reads are faster from the page cache. Ski-rental rule:
admit a shard to the page cache after direct reads of twice the length of the shard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_LENGTHS_BEFORE_CACHING = 2
_SETTLED_SECONDS = 1.0  # other threads may still be reading the records that were admitted


@dataclass
class _ShardState:
    direct_bytes: int = 0
    cached_position: int | None = None
    cached_at: float = 0.0
    evictions: int = 0


class Admission:
    """Decides for each shard whether to read through the page cache. Thread-safe.

    Args:
        shard_bytes: length of a shard in bytes.
    """

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._shards: dict[int, _ShardState] = {}
        self._lock = threading.Lock()

    def through_cache(self, shard: int, position: int, size: int, is_resident: Callable[[int, int], bool]) -> bool:
        """Record a read of `size` bytes of a shard. Return True if this read should go through the page cache.

        Each eviction of an admitted shard doubles the bytes of direct reads before the next admission of this shard.

        Args:
            shard: shard number.
            position: position of one of the records to read.
            size: number of bytes to read.
            is_resident: function `(shard, position)` that returns True if the record is in the page cache.
        """
        now = time.monotonic()
        with self._lock:
            state = self._shards.setdefault(shard, _ShardState())
            cached = state.cached_position
            if cached is not None and now - state.cached_at > _SETTLED_SECONDS and not is_resident(shard, cached):
                state.cached_position, state.direct_bytes = None, 0
                state.evictions += 1
            threshold = _LENGTHS_BEFORE_CACHING * self._shard_bytes << state.evictions
            if state.cached_position is None and state.direct_bytes < threshold:
                state.direct_bytes += size
                return False
            state.cached_position, state.cached_at = position, now
            return True
