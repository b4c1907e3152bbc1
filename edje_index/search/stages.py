"""Measures the duration of each stage of a search."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edje_index.scoring.parts import Floats, Pairs, Part

TEXT_TOWER, VISION_TOWER, NEAREST, FETCH = "text_tower", "vision_tower", "nearest", "fetch"
JOINT_ENCODER, OTHER_PARTS, HITS, TOTAL = "joint_encoder", "other_parts", "hits", "total"
STAGES = (TEXT_TOWER, VISION_TOWER, NEAREST, FETCH, JOINT_ENCODER, OTHER_PARTS, HITS, TOTAL)
"""Stages in the order of a search.

`fetch` reads and decodes tokens. `other_parts` computes the parts of the final score except the logit.
`hits` sorts the candidates and looks up their uris. `total` is the time of the whole search. The first search of a
`TokenIndex` also reads the weights of the tower.
"""


class Stages:
    """Measures the durations of the stages of one search. The stage `total` starts when the object is created."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the duration of the `with` block to the duration of `stage`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of `total` and of each stage that has run."""
        return {**self._seconds, TOTAL: time.perf_counter() - self._started}


@dataclass(frozen=True)
class TimedPart:
    """A part of the final score. The duration of computing the part is added to `stage`."""

    part: Part
    stages: Stages
    stage: str

    def of(self, pairs: Pairs) -> Floats:
        with self.stages.timed(self.stage):
            return self.part.of(pairs)
