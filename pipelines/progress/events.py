"""Events that a job reports while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from edje_index.progress import OnProgress

Bottleneck = Literal["decode", "model", "write"]
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels of the events in a log, from the least to the most important."""


@dataclass(frozen=True)
class StatusMessage:
    """One line of text for the user, for example about the next step of a job.

    Attributes:
        text: the line.
        is_warning: True if the text reports a problem, for example a lost node.
    """

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class PlanReady:
    """The plan of a job, reported once the amount of work is known.

    Attributes:
        inputs: number of inputs in all sources.
        shards: number of shards of the index.
        finished_shards: number of shards that earlier runs finished.
        workers: number of worker processes; None if the engine decides.
        duplicates: number of inputs that are byte-identical to an earlier input.
        ignored: number of files in the sources that are not inputs, by file extension.
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
        finished: number of finished shards.
        total: number of shards of the index.
        failed_rows: number of rows that could not be encoded.
        bottleneck: stage in which the workers of this run spent the most time; None if no times are known yet.
    """

    finished: int
    total: int
    failed_rows: int = 0
    bottleneck: Bottleneck | None = None


@dataclass(frozen=True)
class FinishedShard:
    """A shard that a job has finished.

    Attributes:
        shard: shard number.
        rows: number of rows, including failed rows.
        failed: number of failed rows.
        stage_seconds: seconds spent in each stage; empty if an earlier run finished the shard.
    """

    shard: int
    rows: int
    failed: int
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Progress:
    """The progress of one activity.

    Attributes:
        activity: name of the activity, for example "indexing".
        done: number of finished units of work.
        total: number of all units of work; None if unknown.
        shards: counts of the shards; None if the job does not process shards.
        finished_shard: the shard that was just finished; None if the event reports something else.
    """

    activity: str
    done: int
    total: int | None = None
    shards: ShardCounts | None = None
    finished_shard: FinishedShard | None = None


Event = StatusMessage | PlanReady | Progress
OnEvent = Callable[[Event], None]
"""Function that a job calls with each event. A build may call it from two threads, but only from one at a time."""


def progress_callback(on_event: OnEvent) -> OnProgress:
    """Return a callback (activity, done, total) that passes `Progress` events to `on_event`."""
    return lambda activity, done, total: on_event(Progress(activity, done, total))
