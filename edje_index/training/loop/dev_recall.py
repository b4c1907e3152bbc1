"""Measures recall on the dev captions during a training run. As in the published code, the score is the logit alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from edje_index.training.fitting.dev_pools import DevSet, dev_recalls, make_dev_set
from edje_index.training.loop.log import Record
from edje_index.training.loop.opened_task import OpenedTask
from edje_index.training.loop.task import TrainTask

DEV = "dev"
RECALL = "recall"  # mean R@1 of both directions; evaluations are ranked by this value


@dataclass(frozen=True)
class Evaluation:
    """How a phase is evaluated.

    Attributes:
        every: number of steps between two evaluations.
        recalls: evaluates the current weights. Returns R@1 by direction, and the mean of both as "recall", between 0
            and 1.
    """

    every: int
    recalls: Callable[[], dict[str, float]]

    def is_due(self, step: int) -> bool:
        """Return True if an evaluation follows after `step` finished steps."""
        return step % self.every == 0


def dev_evaluation(task: TrainTask, opened: OpenedTask, steps_per_epoch: float) -> Evaluation | None:
    """Return the evaluation of the joint phase. Return None without dev captions or if ``evaluate_every`` is 0."""
    every = task.runtime.evaluate_every
    if task.dev is None or every == 0:
        return None
    bundle, features, settings = opened.start, opened.source.features, task.config.fitting
    captions = task.dev

    @cache  # computed by only one worker, and only when the first evaluation is due
    def dev_set() -> DevSet:
        return make_dev_set(captions, bundle.text.encode(captions.captions.texts()))

    def recalls() -> dict[str, float]:
        modules: tuple[nn.Module, ...] = (bundle.adapter, bundle.joint)
        were_training = [module.training for module in modules]
        try:
            for module in modules:
                module.eval()
            by_direction = dev_recalls(bundle, dev_set(), features, settings)
        finally:
            for module, was_training in zip(modules, were_training, strict=True):
                module.train(was_training)
        return {**by_direction, RECALL: sum(by_direction.values()) / len(by_direction)}

    return Evaluation(every or max(1, round(steps_per_epoch)), recalls)


def dev_record(stage: int, step: int, steps: int, recalls: dict[str, float]) -> dict[str, Any]:
    """Return the log record of an evaluation that ran after `step` of `steps` steps."""
    return {"stage": stage, "phase": DEV, "step": step, "steps": steps, **recalls}


def best_steps(records: list[dict[str, Any]], count: int) -> set[tuple[int, int]]:
    """Return (stage, step) of the `count` evaluations with the highest recall.

    If evaluations have equal recall, later evaluations are preferred.
    """
    evaluations: list[Record] = [record for record in records if record["phase"] == DEV]
    ranked = sorted(evaluations, key=lambda record: (record[RECALL], record["stage"], record["step"]), reverse=True)
    return {(record["stage"], record["step"]) for record in ranked[:count]}
