"""What a job tells about itself while it runs: plain values, made for any display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Bottleneck = Literal["decode", "model", "write"]


@dataclass(frozen=True)
class Planning:
    """The sources are being listed (and hashed, with --dedupe)."""

    inputs: int


@dataclass(frozen=True)
class PlanReady:
    """The work is known.

    Attributes:
        inputs, duplicates: of the plan.
        shards, finished_shards: of the plan, and how many of them an earlier run left finished.
        ignored: files of the sources that are no inputs, by extension.
        workers: processes that will hold a model.
    """

    inputs: int
    duplicates: int
    shards: int
    finished_shards: int
    ignored: dict[str, int]
    workers: int


@dataclass(frozen=True)
class Progress:
    """How far the shards are.

    Attributes:
        rows_done, rows, shards_done, shards, failed: counts, those of earlier runs included.
        images_per_second: over the last half minute or so.
        seconds_left: None while it cannot be told.
        bottleneck: what the workers spent most of that time on; None while it cannot be told.
    """

    rows_done: int
    rows: int
    shards_done: int
    shards: int
    failed: int
    images_per_second: float
    seconds_left: float | None
    bottleneck: Bottleneck | None


@dataclass(frozen=True)
class ShardDone:
    """A shard was committed."""

    shard: int
    progress: Progress


@dataclass(frozen=True)
class StatusMessage:
    """A line about what the job does now, for example "building the nearest-neighbour index"."""

    text: str


Event = Planning | PlanReady | Progress | ShardDone | StatusMessage
OnEvent = Callable[[Event], None]
