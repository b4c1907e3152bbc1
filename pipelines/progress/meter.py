"""Rates and the bottleneck of a build, from what its workers report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipelines.progress.events import Bottleneck, Progress

_WINDOW_SECONDS = 30.0
# The loop of a worker is always at one of three: waiting for decoded images, running the model, writing.
_STAGES: dict[str, Bottleneck] = {"wait": "decode", "encode": "model", "write": "write"}


def bottleneck(seconds: Mapping[str, float]) -> Bottleneck | None:
    """What workers spent most time on, given their seconds by stage; None where they spent none."""
    stage = max(_STAGES, key=lambda name: seconds.get(name, 0.0))
    return _STAGES[stage] if seconds.get(stage, 0.0) > 0 else None


@dataclass(frozen=True)
class ShardState:
    """How far a shard is: rows done, those of them that failed, and seconds by stage."""

    done: int
    failed: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sample:
    time: float
    done: int
    seconds: dict[str, float]


class BuildMeter:
    """Adds up the latest state of every shard.

    Args:
        rows, shards: of the whole build.
        clock: seconds, monotonic.
    """

    def __init__(self, rows: int, shards: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows = rows
        self._shards = shards
        self._clock = clock
        self._open: dict[int, ShardState] = {}
        self._earlier = self._finished_shards = self._failed = 0
        self._finished_rows = 0
        self._finished_seconds = dict.fromkeys(_STAGES, 0.0)
        self._samples = deque([_Sample(clock(), 0, dict(self._finished_seconds))])

    def finished_earlier(self, rows: int, failed: int) -> None:
        """Count a shard of an earlier run; it does not enter rates."""
        self._earlier += rows
        self._failed += failed
        self._finished_shards += 1

    def report(self, shard: int, state: ShardState) -> None:
        """Take the state of a shard that is under way."""
        self._open[shard] = state
        self._sample()

    def finished(self, shard: int, state: ShardState) -> None:
        """Take the final state of a shard."""
        self._open.pop(shard, None)
        self._finished_shards += 1
        self._finished_rows += state.done
        self._failed += state.failed
        for stage in _STAGES:
            self._finished_seconds[stage] += state.seconds.get(stage, 0.0)
        self._sample()

    def progress(self) -> Progress:
        """The sum of it all, and rates over the window."""
        oldest, latest = self._samples[0], self._samples[-1]
        elapsed = latest.time - oldest.time
        rate = max(0.0, (latest.done - oldest.done) / elapsed) if elapsed > 0 else 0.0
        done = self._earlier + latest.done
        return Progress(
            rows_done=done,
            rows=self._rows,
            shards_done=self._finished_shards,
            shards=self._shards,
            failed=self._failed + sum(state.failed for state in self._open.values()),
            images_per_second=rate,
            seconds_left=(self._rows - done) / rate if rate > 0 else None,
            bottleneck=bottleneck({stage: latest.seconds[stage] - oldest.seconds[stage] for stage in _STAGES}),
        )

    def _sample(self) -> None:
        now = self._clock()
        open_states = self._open.values()
        done = self._finished_rows + sum(state.done for state in open_states)
        seconds = {
            stage: total + sum(state.seconds.get(stage, 0.0) for state in open_states)
            for stage, total in self._finished_seconds.items()
        }
        self._samples.append(_Sample(now, done, seconds))
        while len(self._samples) > 2 and self._samples[1].time <= now - _WINDOW_SECONDS:
            self._samples.popleft()
