"""What is printed and drawn of an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PIL import Image

from edje_index.evaluation.bootstrap import Estimate
from edje_index.evaluation.report import markdown_report, text_report, to_json, write_report
from edje_index.evaluation.results import Evaluation, Inputs, Result, System
from edje_index.scoring.weights import ScoreWeights
from storage_formats.errors import UsageError


def around(value: float, intervals: bool) -> Estimate:
    return Estimate(value, value - 1, value + 1) if intervals else Estimate(value)


def evaluation(*, intervals: bool = True) -> Evaluation:
    """Two precisions, the second one simulated, at two pools."""
    plain = {1: around(10.04, intervals), 5: around(30.0, intervals)}
    better = {1: around(20.0, intervals), 5: around(40.0, intervals)}
    gain = {1: around(9.96, intervals), 5: around(10.0, intervals)}
    change = {1: around(-0.124, intervals), 5: around(0.0, intervals)}
    results = [Result("photos", "t2i", plain)]
    for pool in (10, 100):
        shared = {"pool": pool, "in_pool": around(61.0, intervals), "gain": gain}
        results.append(Result("photos", "t2i", better, precision="bf16", bytes_per_image=49152, **shared))
        lossy = {"precision": "fp8", "simulated_from": "bf16", "bytes_per_image": 24576}
        results.append(Result("photos", "t2i", better, **lossy, **shared, change=change, change_from="bf16"))
    weights = ScoreWeights(late=4.0, pooled=3.0, embedding=2.5, hubness=0.5)
    by_direction = {"t2i": weights.to_json(), "i2t": replace(weights, late=1.0).to_json()}
    system = System("photos", "i", "b", "f" * 64, True, (64, 384), by_direction, {"t2i": 1000}, {"t2i": 5000})
    inputs = Inputs(1001, 1000, {"not-in-index": 1}, 5005, 5000)
    shape = ((1, 5), (10, 100), 1000 if intervals else 0, 0)
    return Evaluation("split", "c.jsonl", "dev", *shape, inputs, (system,), tuple(results), 123456, 60.0)


def test_the_text_says_what_was_measured_and_on_what():
    text = text_report(evaluation())
    assert "used 1,000 images with 5,000 captions, missing 1 images (not-in-index 1)" in text
    terms = "4 x late interaction + 3 x pooled similarity + 2.5 x embedding similarity + 0.5 x hubness correction"
    assert f"bundle ffffffffffff, text-to-image score = logit + {terms}, image-to-text score = logit + 1 x late" in text
    assert "Text-to-image: 5,000 queries, 1,000 images" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("photos  ")]
    assert rows[0][:7] == ["photos", "embedding", "only", "-", "-", "10.0", "[9.0,"]
    assert " ".join(rows[2]) == (
        "photos fp8* 24.6 10 20.0 [19.0, 21.0] 40.0 [39.0, 41.0] 61.0 +10.0 [+9.0, +11.0] -0.12 [-1.12, +0.88]"
    )
    assert "converted in memory: fp8 from bf16." in text
    assert len({len(line) for line in text.splitlines() if line.startswith("photos  ")}) == 1, "columns are aligned"


def test_rounded_logits_are_named():
    found = evaluation()
    rounded = replace(found, systems=(replace(found.systems[0], dtype="bfloat16"),))
    assert "x hubness correction, logits in bfloat16" in text_report(rounded)
    assert "bfloat16" not in text_report(found)
    assert to_json(rounded)["systems"][0]["dtype"] == "bfloat16"


def test_without_resamples_no_brackets():
    text = text_report(evaluation(intervals=False))
    assert "[" not in text
    assert "bootstrap" not in text


def test_markdown_tables_have_as_many_cells_in_each_row():
    lines = [line for line in markdown_report(evaluation(), ["a.png"]).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5
    assert len({line.count("|") for line in lines}) == 1
    assert "![a](a.png)" in markdown_report(evaluation(), ["a.png"])


def test_json_has_every_figure():
    value = json.loads(json.dumps(to_json(evaluation())))
    assert value["results"][0] == {
        "system": "photos",
        "direction": "t2i",
        "recall": {
            "1": {"value": 10.04, "low": 9.04, "high": 11.04},
            "5": {"value": 30.0, "low": 29.0, "high": 31.0},
        },
    }
    assert value["results"][2]["change"]["1"]["value"] == -0.124


@pytest.mark.parametrize("intervals", [True, False])
def test_plots_are_drawn(tmp_path, intervals):
    written = write_report(evaluation(intervals=intervals), tmp_path / "a" / "b")
    images = [path for path in written if path.suffix == ".png"]
    assert [path.name for path in images] == ["recall-pool-t2i-photos.png", "recall-bytes-t2i.png"]
    for path in images:
        with Image.open(path) as image:
            colours = image.convert("RGB").getcolors(1 << 20)
            assert image.width > 600
            assert len(colours) > 10


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report(evaluation(), tmp_path / "file" / "out")
