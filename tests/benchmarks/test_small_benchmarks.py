"""`bench make-synthetic`, `bench build` and `bench gpu`."""

from dataclasses import asdict

import numpy as np
import pytest

from benchmarks import build, gpu
from edje_index import ImageEncoder
from edje_index.bundles.random_bundle import TINY
from storage_formats import TokenStore, verify_index
from tests.integration.builds import make_photos


def test_a_synthetic_index_is_sound_and_repeatable(tmp_path, run):
    options = ("--rows", 1100, "--precision", "fp8")
    for name in "ab":
        built = run.json("bench", "make-synthetic", tmp_path / name, *options)
        assert built["shards"] == 2
        assert verify_index(tmp_path / name) == []
    a, b = (
        TokenStore.open(tmp_path / name, "fp8").fetch(range(1000, 1100)).view(np.uint16)
        for name in "ab"
    )
    assert (a == b).all()
    assert "not empty" in run.refused("bench", "make-synthetic", tmp_path, *options)


# starts several processes with torch
@pytest.mark.slow
def test_builds_are_compared_with_a_bare_loop(tmp_path, run):
    make_photos(tmp_path / "photos", 4)
    rows = run.json("bench", "build", tmp_path / "photos", "--images", 24)["rows"]
    assert {(row["table"], row["subject"]) for row in rows} == {
        (f"24 photos, no model, {size} pixels", subject)
        for size in (224, 384)
        for subject in ("bare loop", "inline")
    }
    for row in rows:
        values = row["values"]
        assert min(values["photos/s"], values["CPU ms"], values["memory MiB"]) > 0


def test_a_model_that_costs_nothing_encodes_what_a_build_stores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImageEncoder, "encode", ImageEncoder.encode)
    make_photos(tmp_path / "photos", 3)
    given = [1, "model", asdict(TINY), str(tmp_path / "photos"), 5, "cpu", True]
    (result,) = build.measure("inline", *given)
    values = result["values"]
    assert values["photos/s"] > 0
    assert values["encode s"] < values["wait s"] + values["decode s"] + 1
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "model"}


# starts several processes with torch
@pytest.mark.slow
def test_results_of_a_device_are_compared_with_those_of_the_cpu(tmp_path, run):
    make_photos(tmp_path / "photos", 5)
    rows = run.json("bench", "gpu", tmp_path / "photos", "--tiny")["rows"]
    tables = {row["table"] for row in rows if row["values"]}
    assert set(gpu.PARTS) < tables
    # builds with two towers
    assert len(tables) == len(gpu.PARTS) + 2
    assert not any(row["problems"] for row in rows)


def test_wrong_results_of_a_device_are_found(tmp_path, monkeypatch):
    make_photos(tmp_path / "photos", 1)
    decode = gpu.decode_records_torch
    monkeypatch.setattr(gpu, "decode_records_torch", lambda *given: decode(*given) + 1)
    monkeypatch.setattr(gpu, "precisions", lambda: ["fp8"])
    (wrong,) = gpu.measure("decode", str(tmp_path / "photos"), "cpu", True)
    assert wrong["problem"].startswith("WRONG")
    monkeypatch.setattr(gpu, "decode_records_torch", decode)
    (right,) = gpu.measure("decode", str(tmp_path / "photos"), "cpu", True)
    assert "problem" not in right
    assert right["values"]["GB/s"] > 0


def test_folders_without_photos_are_refused(tmp_path, run):
    for name in ("build", "gpu"):
        assert "has no photos" in run.refused("bench", name, tmp_path)
