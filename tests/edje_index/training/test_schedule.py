"""The learning rate of every step, against the published code's loop over epochs, written out in plain Python."""

from __future__ import annotations

import pytest

from edje_index.training.config import OptimizerConfig, make_config
from edje_index.training.loop.schedule import learning_rate
from edje_index.training.presets import PRESETS

PRETRAINING = OptimizerConfig()
FINETUNING = make_config(PRESETS["paper-finetune"]).optimizer


def published_rates(config: OptimizerConfig, epochs: int, steps_per_epoch: int) -> list[float]:
    """A step schedule per epoch; the steps of the first epoch are warmed up."""
    rates = []
    for epoch in range(epochs):
        rate = max(config.min_lr, config.lr * config.decay_rate**epoch)
        for step in range(steps_per_epoch):
            if epoch == 0:
                warm = config.warmup_lr + (config.lr - config.warmup_lr) * step / config.warmup_steps
                rate = min(config.lr, warm)
            rates.append(rate)
    return rates


@pytest.mark.parametrize("config", [PRETRAINING, FINETUNING], ids=["pretraining", "fine-tuning"])
@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(60, 130), (12, 500), (8, 100), (9, 40)])
def test_every_step_has_the_published_rate(config, epochs, steps_per_epoch):
    """Also if the warm-up is longer than the first epoch, and down to the minimum."""
    total = epochs * steps_per_epoch
    rates = [learning_rate(step, total, float(steps_per_epoch), config.lr, config) for step in range(total)]
    assert rates == pytest.approx(published_rates(config, epochs, steps_per_epoch), rel=1e-12)


def at(step: int, config: OptimizerConfig = PRETRAINING, total: int = 10000) -> float:
    return learning_rate(step, total, 500.0, 3e-4, config)


def test_warm_up_is_linear_from_1e_6_over_100_steps():
    assert at(0) == 1e-6
    assert at(50) == pytest.approx((1e-6 + 3e-4) / 2)
    assert at(100) == pytest.approx(3e-4)


def test_never_below_the_minimum():
    assert at(500 * 200) == 1e-6


def test_cosine_ends_at_the_minimum():
    cosine = PRETRAINING.model_copy(update={"decay": "cosine"})
    assert at(100, cosine) == pytest.approx(3e-4)
    assert at(5050, cosine) == pytest.approx((3e-4 + 1e-6) / 2)
    assert at(10000, cosine) == pytest.approx(1e-6)
    assert learning_rate(50, 1000, 10.0, 3e-4, cosine) < 3e-4, "its warm-up may take several epochs"
