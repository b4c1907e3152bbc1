"""How many inputs of a build may fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.jobs import failed_inputs
from pipelines.jobs.failed_inputs import FailedInputsError, FailureLimit
from pipelines.planning.plan import BuildPlan
from storage_formats.format.layout import IndexSpec
from storage_formats.format.receipts import ShardReceipt


@pytest.mark.parametrize(
    ("rows", "max_failed", "allowed"),
    [
        (10, None, 20),
        (2_000, None, 20),
        (10_000, None, 100),
        (100, 0.29, 29),
        (100, 0.01, 1),
        (100, 0.0, 0),
        (100, 1.0, 100),
    ],
)
def test_the_number_of_inputs_that_may_fail(monkeypatch, rows, max_failed, allowed):
    monkeypatch.setattr(failed_inputs, "_first_failures", lambda plan, receipts: "a.jpg (empty)")
    spec = IndexSpec(rows=rows, shard_size=rows - 1, block_shape=(4, 16), embed_dim=8)
    plan = BuildPlan(Path("photos.edje"), spec, {}, None, "", 0, {})

    def check(failed: int) -> None:
        FailureLimit(plan, max_failed)(ShardReceipt(0, "plan", rows, rows - failed, 0, {"empty": failed}, (), {}))

    check(allowed)
    with pytest.raises(FailedInputsError, match=rf"^{allowed + 1:,} of {rows:,} inputs failed, more than "):
        check(allowed + 1)
