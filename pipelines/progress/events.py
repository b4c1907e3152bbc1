"""Events that a job reports while it runs. They are plain values, so that any display can show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from edje_index.progress import OnProgress

Bottleneck = Literal["decode", "model", "write"]


@dataclass(frozen=True)
class StatusMessage:
    """One line about what the job does next or has noticed."""

    text: str


@dataclass(frozen=True)
class PlanReady:
    """The amount of work is known.

    Attributes:
        inputs: inputs of all sources.
        shards: shards of the index.
        finished_shards: shards that an earlier run finished.
        workers: worker processes; None if the engine decides.
        duplicates: inputs that are byte-identical to an earlier one.
        ignored: number of files that are not inputs, by extension.
    """

    inputs: int
    shards: int
    finished_shards: int = 0
    workers: int | None = None
    duplicates: int = 0
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardCounts:
    """Shards of a job, those of earlier runs included.

    Attributes:
        finished: committed shards.
        total: shards of the index.
        failed_rows: rows that could not be encoded.
        bottleneck: the stage that the workers of this run spent most time on, if any has been measured.
    """

    finished: int
    total: int
    failed_rows: int = 0
    bottleneck: Bottleneck | None = None


@dataclass(frozen=True)
class Progress:
    """How far one activity has come.

    Attributes:
        activity: for example "indexing".
        done: finished units of work.
        total: all units; None if unknown.
        shards: set by jobs that work shard by shard.
    """

    activity: str
    done: int
    total: int | None = None
    shards: ShardCounts | None = None


Event = StatusMessage | PlanReady | Progress
OnEvent = Callable[[Event], None]


def progress_callback(on_event: OnEvent) -> OnProgress:
    """A callback for library functions that reports `Progress` events to `on_event`."""
    return lambda activity, done, total: on_event(Progress(activity, done, total))
