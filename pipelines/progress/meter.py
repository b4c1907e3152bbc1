"""Computes the progress of a job from the states of its shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipelines.progress.events import Bottleneck, FinishedShard, Progress, ShardCounts

# A worker is always in one of three stages: waiting for decoded images, running the model, writing.
_BOTTLENECK_OF_STAGE: dict[str, Bottleneck] = {"wait": "decode", "encode": "model", "write": "write"}


def bottleneck(stage_seconds: Mapping[str, float]) -> Bottleneck | None:
    """Return the slowest stage, or None if no stage took any time."""
    slowest = max(_BOTTLENECK_OF_STAGE, key=lambda stage: stage_seconds.get(stage, 0.0))
    return _BOTTLENECK_OF_STAGE[slowest] if stage_seconds.get(slowest, 0.0) > 0 else None


@dataclass(frozen=True)
class ShardState:
    """Progress of one shard.

    Attributes:
        done: number of finished rows, including failed rows.
        failed: number of failed rows.
        stage_seconds: seconds spent in each stage.
    """

    done: int
    failed: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)


class ShardMeter:
    """Computes the `Progress` of a job from the latest state of each shard.

    Args:
        activity: name of the activity.
        rows: number of rows of the whole job.
        shards: number of shards of the whole job.
    """

    def __init__(self, activity: str, rows: int, shards: int) -> None:
        self._activity = activity
        self._rows = rows
        self._shards = shards
        self._finished_shards = 0
        self._finished = ShardState(0)
        self._running: dict[int, ShardState] = {}

    def update(self, shard: int, state: ShardState) -> Progress:
        """Record the state of a running shard and return the progress of the job."""
        self._running[shard] = state
        return self.progress()

    def finish(self, shard: int, state: ShardState) -> Progress:
        """Record the final state of a shard and return the progress of the job.

        For a shard that an earlier run finished, leave `state.stage_seconds` empty.
        """
        self._running.pop(shard, None)
        self._finished_shards += 1
        self._finished = _sum([self._finished, state])
        return replace(
            self.progress(), finished_shard=FinishedShard(shard, state.done, state.failed, state.stage_seconds)
        )

    def progress(self) -> Progress:
        """Return the progress of the job."""
        total = _sum([self._finished, *self._running.values()])
        shards = ShardCounts(self._finished_shards, self._shards, total.failed, bottleneck(total.stage_seconds))
        return Progress(self._activity, total.done, self._rows, shards)


def _sum(states: list[ShardState]) -> ShardState:
    seconds = {stage: sum(state.stage_seconds.get(stage, 0.0) for state in states) for stage in _BOTTLENECK_OF_STAGE}
    return ShardState(sum(state.done for state in states), sum(state.failed for state in states), seconds)
