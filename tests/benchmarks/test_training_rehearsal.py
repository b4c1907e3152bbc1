"""The rehearsal of a large training set runs at a small size and measures every stage."""

from __future__ import annotations

import pytest

from benchmarks.training_rehearsal import rehearse
from edje_index.training.data.dataset import TrainingData


@pytest.mark.slow
def test_every_stage_is_measured(tmp_path):
    stages = list(rehearse(tmp_path, 2000))
    assert [name for name, _, _ in stages] == ["index", "preparation", "sampling and mining"]
    assert all(0 < peak < 4 for _, _, peak in stages)
    assert TrainingData.open(tmp_path / "data").pairs("captions") == 2000
