"""The comparison of runtimes for the joint encoder, on a tiny model."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import kendalltau

from benchmarks.joint_runtimes import RUNTIMES, embedded_rows, kendall_tau


@pytest.mark.parametrize("name", ["torch float32", "torch bfloat16", "JointScorer float32", "JointScorer bfloat16"])
def test_a_runtime_computes_the_logits(tiny_model, name):
    joint, blocks = tiny_model.joint, torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = joint.score("two dogs", blocks)
    with torch.inference_mode():
        logits = RUNTIMES[name][1](joint, 1)(embedded_rows(joint, "two dogs", blocks))
    torch.testing.assert_close(logits, expected, atol=1e-5 if "float32" in name else 5e-3, rtol=0)
    assert torch.equal(joint.score("two dogs", blocks), expected), "the model is not changed"


def test_rank_correlation():
    rng = torch.Generator().manual_seed(2)
    left, right = torch.randn(30, generator=rng), torch.randn(30, generator=rng)
    assert kendall_tau(left, right) == pytest.approx(kendalltau(left, right).statistic)
    assert kendall_tau(left, left) == pytest.approx(1)
