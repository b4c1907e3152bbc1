"""Indexes in the run folder of a training."""

from __future__ import annotations

import pytest

from pipelines.jobs.training.indexes import IndexBuilder
from pipelines.jobs.training.request import RunSettings
from storage_formats.errors import EdjeError


def test_images_that_cannot_be_read_are_named_with_what_to_do(tmp_path, tiny_bundle):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"path": "nowhere/1.jpg"}\n{"path": "nowhere/2.jpg"}\n')
    run = RunSettings(out=tmp_path / "out", device="cpu", threads=1)
    builder = IndexBuilder(run.folder, run, "float32", lambda _: None, lambda: False)
    with pytest.raises(EdjeError) as caught:
        builder.build("features.edje", tiny_bundle, (str(wrong),), "computing features")
    message = str(caught.value)
    assert "none of the 2 inputs could be indexed (missing 2)" in message
    assert "nowhere/1.jpg (missing), " in message
    assert message.endswith(
        f"Correct the captions or inputs.images; then remove the run folder {run.folder} and train again"
    )


def test_auto_builds_as_the_training_loop_computes(tmp_path, tiny_bundle, photos, monkeypatch):
    monkeypatch.setattr("pipelines.planning.plan.has_bfloat16", lambda: True)
    run = RunSettings(out=tmp_path / "out", device="cpu", threads=1)
    builder = IndexBuilder(run.folder, run, "auto", lambda _: None, lambda: False)
    index = builder.build("features.edje", tiny_bundle, (str(photos),), "computing features")
    assert index.manifest.settings["dtype"] == "float32"
