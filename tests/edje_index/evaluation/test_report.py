"""What the report of an evaluation says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edje_index.evaluation.evaluate import Evaluation, Inputs, Result, System
from edje_index.evaluation.recall import Estimate
from edje_index.evaluation.report import evaluation_report, write_report
from edje_index.scoring.weights import ScoreWeights
from storage_formats.errors import UsageError


def around(value: float) -> Estimate:
    return Estimate(value, value - 1, value + 1)


@pytest.fixture
def evaluation() -> Evaluation:
    """Two precisions, the second one simulated."""
    results = [Result("t2i", {1: around(10.04), 5: around(30.0)})]
    shared = {"pool": 10, "in_pool": around(61.0), "gain": {1: around(9.96), 5: around(10.0)}}
    better = {1: around(20.0), 5: around(40.0)}
    results.append(Result("t2i", better, precision="bf16", bytes_per_image=49152, **shared))
    lossy = {"precision": "fp8", "simulated_from": "bf16", "bytes_per_image": 24576, "change_from": "bf16"}
    results.append(Result("t2i", better, **lossy, **shared, change={1: around(-0.124), 5: around(0.0)}))
    weights = {"t2i": ScoreWeights(late=4.0, hubness=0.5).to_json()}
    system = System("photos", "i", "b", "f" * 64, True, (64, 384), weights, {"t2i": 1000}, {"t2i": 5000}, "bfloat16")
    inputs = Inputs(1001, 1000, {"not-in-index": 1}, 5005, 5000)
    return Evaluation("split", "c.jsonl", "dev", (1, 5), (10,), 1000, 0, inputs, system, tuple(results), 123456, 60.0)


def test_the_report_says_what_was_measured_and_on_what(evaluation):
    text = evaluation_report(evaluation)
    assert "used 1,000 images with 5,000 captions, missing 1 images (not-in-index 1)" in text
    assert "text-to-image score = logit + 4 x late interaction + 0.5 x hubness correction, logits in bfloat16" in text
    assert "Text-to-image: 5,000 queries, 1,000 images" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert " ".join(rows[-1].replace("|", " ").split()) == (
        "fp8* 24.6 10 20.0 [19.0, 21.0] 40.0 [39.0, 41.0] 61.0 +10.0 [+9.0, +11.0] -0.12 [-1.12, +0.88]"
    )
    assert "converted in memory: fp8 from bf16." in text
    assert len({(len(row), row.count("|")) for row in rows}) == 1, "columns are aligned"
    plain = replace(evaluation, resamples=0, results=(Result("t2i", {1: Estimate(1.0), 5: Estimate(2.0)}),))
    assert "[" not in evaluation_report(plain)


def test_the_files_have_every_figure(evaluation, tmp_path):
    write_report(tmp_path / "a" / "b", evaluation_report(evaluation), evaluation.to_json())
    assert (tmp_path / "a/b/report.md").read_text() == evaluation_report(evaluation)
    value = json.loads((tmp_path / "a/b/report.json").read_text())
    assert value["systems"][0]["dtype"] == "bfloat16"
    assert value["results"][0] == {
        "system": "photos",
        "direction": "t2i",
        "recall": {
            "1": {"value": 10.04, "low": 9.04, "high": 11.04},
            "5": {"value": 30.0, "low": 29.0, "high": 31.0},
        },
    }
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report(tmp_path / "a/b/report.md/out", "", {})
