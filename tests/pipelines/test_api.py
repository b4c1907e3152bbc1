"""The functions for Python programs: their settings reach the jobs, and wrong ones are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from pipelines import JobStopped, build_index, quantize_index, train
from pipelines.api import BuildOptions
from pipelines.planning.config import BuildConfig
from pipelines.progress.events import PlanReady
from storage_formats import Manifest, verify_index
from storage_formats.errors import UsageError


def test_every_setting_of_a_build_is_an_option():
    assert set(BuildOptions.__annotations__) == {field.name for field in fields(BuildConfig)} - {
        "sources",
        "out",
        "model",
    }


def test_build_and_quantize(photos, tiny_bundle, tmp_path):
    events = []
    options = {"engine": "inline", "threads": 1, "shard_size": 4, "dedupe": True, "precisions": ["fp8", "int8"]}
    result = build_index([photos], tmp_path / "index", tiny_bundle, on_event=events.append, **options)
    assert (result.inputs, result.duplicates, result.failed) == (10, 1, 1)
    assert any(isinstance(event, PlanReady) for event in events)
    spec = Manifest.load(tmp_path / "index").spec
    assert (spec.shard_size, spec.precisions) == (4, ("fp8", "int8"))
    assert build_index(photos, tmp_path / "index", tiny_bundle, **options).already_finished
    changed = quantize_index(tmp_path / "index", ["nvfp4"], drop=["int8"], source="fp8")
    assert (changed.source, changed.precisions) == ("fp8", ("fp8", "nvfp4"))
    assert verify_index(tmp_path / "index") == []


def test_a_build_stops_and_resumes(photos, tiny_bundle, tmp_path):
    options = {"engine": "inline", "threads": 1, "shard_size": 4}
    with pytest.raises(JobStopped):
        build_index(photos, tmp_path / "index", tiny_bundle, should_stop=lambda: True, **options)
    assert build_index(photos, tmp_path / "index", tiny_bundle, **options).inputs == 10


@pytest.mark.parametrize("out", ["s3://bucket/photos.edje", Path("s3://bucket/photos.edje"), "ftp://host/photos.edje"])
def test_a_build_at_a_url_is_refused(photos, tiny_bundle, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="is a URL, but a path on this machine is needed"):
        build_index(photos, out, tiny_bundle, engine="inline")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "large-data"}, "unknown preset 'large-data'; choose one of paper"),
        ({"inputs": {"model": "model"}, "loop": {"stepz": 2}}, r"no setting is named loop\.stepz"),
        ({"inputs": {"modell": "model"}}, r"no setting is named inputs\.modell"),
    ],
)
def test_settings_of_a_training_that_are_refused(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        train(tmp_path / "captions.jsonl", tmp_path / "out", **arguments)
