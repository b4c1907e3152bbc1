"""Progress of long work: the type of callbacks, and the progress of one shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

OnProgress = Callable[[str, int, int], None]
"""A callback with three arguments: name of the activity, number of units done, and
total number of units.
"""


@dataclass(frozen=True)
class ShardProgress:
    """Progress of one shard.

    Attributes:
        done: number of finished rows, including failed rows.
        stage_seconds: seconds in each stage. A worker is in one of the stages "wait",
            "encode" and "write" at a time.
    """

    shard: int
    done: int
    failed: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
