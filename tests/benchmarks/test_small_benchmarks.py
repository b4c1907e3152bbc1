"""`bench make-synthetic`, `bench quantize`, `bench build` and the check of a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import gpu_check, quantize
from benchmarks.build import bench_build
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import TokenStore, verify_index
from tests.integration.builds import make_photos


def test_a_synthetic_index_is_sound_and_repeatable(tmp_path, run):
    options = ("--rows", 1100, "--precision", "fp8", "--json")
    for name in "ab":
        code, out, _ = run("bench", "make-synthetic", tmp_path / name, *options)
        assert (code, json.loads(out)["shards"]) == (0, 2)
        assert verify_index(tmp_path / name) == []
    a, b = (
        TokenStore.open(tmp_path / name, "fp8").fetch(range(1000, 1100)).view(np.uint16)
        for name in "ab"
    )
    assert (a == b).all()
    code, _, err = run("bench", "make-synthetic", tmp_path, *options)
    assert (code, "not empty" in err) == (2, True)


def test_every_precision_is_measured(monkeypatch):
    # compiling all kernels takes seconds
    monkeypatch.setattr(quantize, "precisions", lambda: ("bf16", "fp8"))
    report = quantize.bench_quantize(blocks=2, repeats=2)
    assert list(report["median"]) == ["bf16", "fp8", "fp8 with an offset"]
    for rates in report["gb_per_s"].values():
        assert list(rates) == ["encode", "decode", "gather"]
        assert all(len(runs) == 2 and min(runs) > 0 for runs in rates.values())
    assert quantize.report_lines(report)[2].startswith("| bf16 ")


@pytest.mark.slow
def test_a_build_is_compared_with_a_bare_loop(tmp_path):
    make_photos(tmp_path / "photos", 4)
    create_untrained_bundle(tmp_path / "model", sizes=TINY)
    photos = 2 * sorted((tmp_path / "photos").iterdir())
    report = bench_build(photos, tmp_path / "model", repeats=1, engines=["inline"])
    assert report["runs"]["inline"][0]["stdout"]["indexed"] == 8
    assert report["runs"]["bare loop"][0]["stdout"]["images"] == 8
    assert set(report["summary"]) == {"bare loop", "inline"}
    assert set(report["summary"]["bare loop"]["stage_seconds"]) == {"decode", "encode"}
    for row in report["summary"].values():
        assert (
            min(
                row["wall"], row["cpu"], row["peak_pss"], row["model_images_per_second"]
            )
            > 0
        )


@pytest.mark.slow
def test_results_of_a_device_are_compared_with_those_of_the_cpu(tmp_path):
    make_photos(tmp_path / "photos", 5)
    check = gpu_check.GpuCheck(
        tmp_path / "photos", tmp_path / "report", device="cpu", tiny=True
    )
    assert check.run(list(gpu_check._SECONDS), 0)
    assert {line.part for line in check.lines} == set(gpu_check._SECONDS)
    report = next((tmp_path / "report").glob("*-gpu-check.md")).read_text()
    assert "nothing was measured on a GPU" in report
    assert report.count("\n| ") == len(check.lines) + 2


def test_wrong_results_of_a_device_are_found_and_a_part_may_fail(tmp_path, monkeypatch):
    make_photos(tmp_path / "photos", 1)
    check = gpu_check.GpuCheck(
        tmp_path / "photos", tmp_path / "report", device="cpu", tiny=True
    )
    decode = gpu_check.decode_records_torch
    monkeypatch.setattr(
        gpu_check, "decode_records_torch", lambda *given: decode(*given) + 1
    )
    assert not check.run(["decode"], 0)
    assert not any(line.is_right for line in check.lines if "fp8" in line.what)
    monkeypatch.setattr(gpu_check, "precisions", lambda: 1 / 0)
    assert not check.run(["decode", "limits"], 0)
    failed, *others = check.lines[-4:]
    assert failed.what == "failed"
    assert "ZeroDivisionError" in failed.value
    assert all(line.is_right for line in others)
