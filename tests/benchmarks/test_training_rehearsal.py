"""The rehearsal of a large training set runs at a small size and measures every stage."""

from __future__ import annotations

import pytest

from benchmarks.training_rehearsal import STAGES, Rehearsal, rehearse
from edje_index.training.data.dataset import TrainingData


@pytest.mark.slow
def test_every_stage_is_measured(tmp_path):
    stages = dict(rehearse(Rehearsal(tmp_path), 2000))
    assert tuple(stages) == STAGES
    for cost in stages.values():
        assert 0 < cost["stdout"]["imported"] < 2e9
        assert 0 < cost["peak_pss"] < 4e9
        assert cost["stdout"]["seconds"] > 0
    assert TrainingData.open(tmp_path / "data").pairs("captions") == 2000
