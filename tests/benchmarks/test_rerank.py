from __future__ import annotations

import json

import pytest

from benchmarks.rerank import bench_rerank
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("rerank") / "model"
    create_untrained_bundle(path, sizes=TINY)
    return path


def test_every_setting_of_a_bundle_is_measured(model):
    report = bench_rerank(model, batch_sizes=(1, 4), threads=(1, 2), repeats=2, device="cpu")
    ((name, found),) = report["joint_encoders"].items()
    assert name == "model: 1 layers, width 16"
    settings = {f"batch {batch}, {threads} threads" for batch in (1, 4) for threads in (1, 2)}
    assert set(found["median"]) == settings
    assert all(len(rates) == 2 and min(rates) > 0 for rates in found["pairs_per_s"].values())
    assert found["median"][found["best"]] == max(found["median"].values())
    assert found["tokens_per_pair"] >= 14 + 3 + 4  # words of the caption, marks, image; rare words are several
    assert "query" not in report


def test_the_command_prints_one_object(model, capsys):
    arguments = ["--model", model, "--batch-size", 2, "--threads", 1, "--repeats", 1, "--device", "cpu"]
    arguments += ["--dtype", "bfloat16", "--json"]
    assert main(["bench", "rerank", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert next(iter(report["joint_encoders"].values()))["best"] == "batch 2, 1 threads"
    assert report["dtype"] == "bfloat16"


def test_senseless_requests_are_refused(model, index, capsys):
    arguments = ["--model", model, "--index", index, "--batch-size", 1, "--threads", 1, "--repeats", 1]
    assert main(["bench", "rerank", *map(str, arguments)]) == 2
    assert "no nearest-neighbour index" in capsys.readouterr().err
    assert main(["bench", "rerank", "--model", str(model), "--score", "logit"]) == 2
    assert "--score has an effect only with --index" in capsys.readouterr().err
