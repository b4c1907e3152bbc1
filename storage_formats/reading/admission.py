"""Whether reads past the page cache should go through it instead, for what is read again and again.

Direct reads are the fastest way to blocks that are read once, and leave nothing for the next reader; memory is
several times faster than any disk. As whoever rents skis without knowing for how long buys them when the rents have
added up to the price, a shard is read past the cache until twice its length has been, and then through it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_LENGTHS_BEFORE_CACHING = 2
_SETTLED_SECONDS = 1.0  # other threads may still be reading what was admitted


@dataclass
class _Shard:
    past_cache: int = 0
    cached_position: int | None = None
    cached_at: float = 0.0
    evictions: int = 0


class Admission:
    """Decides shard by shard. Thread-safe.

    Args:
        shard_bytes: length of a shard.
    """

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._shards: dict[int, _Shard] = {}
        self._lock = threading.Lock()

    def through_cache(self, shard: int, position: int, size: int, is_resident: Callable[[int, int], bool]) -> bool:
        """Whether the coming read of `size` bytes, that at `position` among them, should fill the page cache.

        Where the cache has lost what it was given, as `is_resident(shard, position)` tells, memory is short: then it
        takes twice as long to the next attempt.
        """
        now = time.monotonic()
        with self._lock:
            state = self._shards.setdefault(shard, _Shard())
            kept = state.cached_position
            if kept is not None and now - state.cached_at > _SETTLED_SECONDS and not is_resident(shard, kept):
                state.cached_position, state.past_cache = None, 0
                state.evictions += 1
            price = _LENGTHS_BEFORE_CACHING * self._shard_bytes << state.evictions
            if state.cached_position is None and state.past_cache < price:
                state.past_cache += size
                return False
            state.cached_position, state.cached_at = position, now
            return True
