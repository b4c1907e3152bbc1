"""Types with which operations that take long report their progress: the type of a
progress callback, and the progress of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

OnProgress = Callable[[str, int, int], None]
"""A callback with three arguments: name of the activity, number of units done, and
total number of units. The name says what a unit is, for example "pairs scored".
"""


@dataclass(frozen=True)
class ShardProgress:
    """Progress of one shard.

    Attributes:
        shard: number of the shard.
        done: number of finished rows, including failed rows.
        failed: number of failed rows.
        stage_seconds: seconds that the worker has spent in each of the stages "wait",
            "encode" and "write", by name. These stages do not overlap. In a build, also
            the seconds in which its helpers "read" and "decode", and the seconds that
            the "helpers" had, both summed over the helpers.
    """

    shard: int
    done: int
    failed: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
