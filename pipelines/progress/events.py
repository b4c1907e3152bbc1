"""Events that a job reports while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from edje_index.progress import OnProgress

Bottleneck = Literal["decode", "model", "write"]


@dataclass(frozen=True)
class StatusMessage:
    """One line of text about what the job does next or has noticed."""

    text: str


@dataclass(frozen=True)
class PlanReady:
    """The plan of a job, reported once the amount of work is known.

    Attributes:
        inputs: number of inputs of all sources.
        shards: number of shards of the index.
        finished_shards: number of shards that earlier runs finished.
        workers: number of worker processes; None if the engine decides.
        duplicates: number of inputs that are byte-identical to an earlier input.
        ignored: number of files that are not inputs, by file extension.
    """

    inputs: int
    shards: int
    finished_shards: int = 0
    workers: int | None = None
    duplicates: int = 0
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardCounts:
    """Counts of the shards of a job, including shards that earlier runs finished.

    Attributes:
        finished: number of committed shards.
        total: number of shards of the index.
        failed_rows: number of rows that could not be encoded.
        bottleneck: stage in which the workers of this run spent the most time; None if no time was measured yet.
    """

    finished: int
    total: int
    failed_rows: int = 0
    bottleneck: Bottleneck | None = None


@dataclass(frozen=True)
class Progress:
    """How much of one activity is finished.

    Attributes:
        activity: name of the activity, for example "indexing".
        done: number of finished units of work.
        total: number of all units of work; None if unknown.
        shards: counts of shards; None for jobs that do not work shard by shard.
    """

    activity: str
    done: int
    total: int | None = None
    shards: ShardCounts | None = None


Event = StatusMessage | PlanReady | Progress
OnEvent = Callable[[Event], None]


def progress_callback(on_event: OnEvent) -> OnProgress:
    """Return a callback for library functions that passes their progress to `on_event` as `Progress` events."""
    return lambda activity, done, total: on_event(Progress(activity, done, total))
