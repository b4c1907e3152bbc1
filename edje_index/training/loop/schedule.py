"""The learning-rate schedule."""

from __future__ import annotations

import math

from edje_index.training.config import OptimizerConfig


def learning_rate(step: int, total_steps: int, steps_per_epoch: float, peak: float, config: OptimizerConfig) -> float:
    """Learning rate of optimiser step `step`, counted from 0.

    A linear warm-up from `warmup_lr` to `peak` comes first. Decay ``epoch`` is then peak * decay_rate^finished_epochs,
    but at least `min_lr`, as in BLIP's code, whose names the paper's table uses. Decay ``cosine`` falls from `peak` to
    `min_lr` at the last step.
    """
    if step < config.warmup_steps:
        return config.warmup_lr + (peak - config.warmup_lr) * step / config.warmup_steps
    floor = min(config.min_lr, peak)
    if config.decay == "epoch":
        return max(floor, peak * config.decay_rate ** int(step // steps_per_epoch))
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return floor + (peak - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
