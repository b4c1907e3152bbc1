"""Length and learning-rate schedule of the joint phase."""

from __future__ import annotations

import math

from edje_index.training.config import LoopConfig, OptimizerConfig
from storage_formats.errors import UsageError


def total_steps(config: LoopConfig, pairs: int) -> int:
    """Return the number of optimiser steps of the joint phase.

    Args:
        config: settings of the training loop.
        pairs: number of pairs per epoch.

    Raises:
        UsageError: neither `config.steps` nor `config.epochs` is set, or `pairs` is less than `config.batch_size`.
    """
    if pairs < config.batch_size:
        raise UsageError(f"{pairs} {config.epoch_of} do not fill a batch of {config.batch_size}; lower loop.batch_size")
    if config.steps is not None:
        return config.steps
    if config.epochs is None:
        raise UsageError("the length of the training run is not set; set loop.steps or loop.epochs")
    return max(1, math.ceil(config.epochs * steps_per_epoch(config, pairs)))


def steps_per_epoch(config: LoopConfig, pairs: int) -> float:
    """Return the number of optimiser steps per epoch of `pairs` pairs. The number may be fractional."""
    return (pairs // config.batch_size) / config.accumulate


def learning_rate(step: int, total_steps: int, steps_per_epoch: float, peak: float, config: OptimizerConfig) -> float:
    """Return the learning rate of optimiser step `step`, counted from 0.

    During warm-up, the learning rate rises linearly from `config.warmup_lr` to `peak`. After warm-up, `config.decay`
    selects the learning rate:

    - "epoch": ``max(config.min_lr, peak * config.decay_rate ** finished_epochs)``.
    - "cosine": falls along a cosine to `config.min_lr` at the last step.
    """
    # As in the published code, warm-up with decay ``epoch`` ends with the first epoch.
    if step < config.warmup_steps and (config.decay == "cosine" or step < steps_per_epoch):
        return config.warmup_lr + (peak - config.warmup_lr) * step / config.warmup_steps
    floor = min(config.min_lr, peak)
    if config.decay == "epoch":
        return max(floor, peak * config.decay_rate ** int(step // steps_per_epoch))
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return floor + (peak - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
