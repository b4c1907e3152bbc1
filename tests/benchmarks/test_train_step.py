"""The training-step benchmark runs at a tiny size and accounts for every subject."""

from __future__ import annotations

import pytest
import torch

from benchmarks.train_step import TrainStepCase, bench_train_step
from edje_index.bundles.random_bundle import TINY
from edje_index.training.model.objectives import JointObjective


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_measures_all_subjects_side_by_side(tmp_path, monkeypatch, dtype):
    cast = []
    forward = JointObjective.forward

    def watched(objective, batch):
        cast.append(torch.is_autocast_enabled("cpu"))
        return forward(objective, batch)

    monkeypatch.setattr(JointObjective, "forward", watched)
    threads = torch.get_num_threads()
    sizes = {"images": 24, "batch_size": 8, "negatives": 2, "windows": 2, "steps": 2, "sizes": TINY}
    case = TrainStepCase(**sizes, dropout=0.1, dtype=dtype, threads=1)
    report = bench_train_step(tmp_path / "bench", case)
    torch.set_num_threads(threads)
    assert {name: len(values) for name, values in report["seconds"].items()} == {"step": 2, "objective": 2, "joint": 2}
    assert len(cast) == 3 * (2 + 1) * 2, "three subjects, a window to warm up and two, of two steps"
    assert set(cast) == {dtype == "bfloat16"}
    assert min(report["median"].values()) > 0
    expected = report["median"]["joint"] / report["median"]["step"]
    assert report["ratios"]["joint / step"] == pytest.approx(expected)
