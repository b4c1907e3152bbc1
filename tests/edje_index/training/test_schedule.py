"""The learning rate, against what the paper's table says."""

from __future__ import annotations

import pytest

from edje_index.training.config import OptimizerConfig
from edje_index.training.loop.schedule import learning_rate

PAPER = OptimizerConfig()


def at(step: int, config: OptimizerConfig = PAPER, total: int = 10000) -> float:
    return learning_rate(step, total, 500.0, 3e-4, config)


def test_warm_up_is_linear_from_1e_6_over_100_steps():
    assert at(0) == 1e-6
    assert at(50) == pytest.approx((1e-6 + 3e-4) / 2)
    assert at(100) == pytest.approx(3e-4)


@pytest.mark.parametrize(("step", "power"), [(499, 0), (500, 1), (999, 1), (1000, 2), (5000, 10)])
def test_it_falls_by_a_tenth_after_each_epoch(step, power):
    assert at(step) == pytest.approx(3e-4 * 0.9**power)


def test_never_below_the_minimum():
    assert at(500 * 200) == 1e-6


def test_cosine_ends_at_the_minimum():
    cosine = PAPER.model_copy(update={"decay": "cosine"})
    assert at(100, cosine) == pytest.approx(3e-4)
    assert at(5050, cosine) == pytest.approx((3e-4 + 1e-6) / 2)
    assert at(10000, cosine) == pytest.approx(1e-6)
