from __future__ import annotations

import json

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("rerank") / "model"
    create_untrained_bundle(path, sizes=TINY)
    return path


def test_the_command_prints_one_object(model, capsys):
    arguments = [
        "--model",
        model,
        "--batch-size",
        2,
        "--threads",
        1,
        "--device",
        "cpu",
    ]
    arguments += ["--dtype", "bfloat16", "--json"]
    assert main(["bench", "rerank", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert list(report["joint_encoder"]["median"]) == ["batch 2, 1 threads"]
    assert report["dtype"] == "bfloat16"


def test_senseless_requests_are_refused(model, index, capsys):
    arguments = [
        "--model",
        model,
        "--index",
        index,
        "--batch-size",
        1,
        "--threads",
        1,
    ]
    assert main(["bench", "rerank", *map(str, arguments)]) == 2
    assert "no nearest-neighbour index" in capsys.readouterr().err
    assert main(["bench", "rerank", "--model", str(model), "--score", "logit"]) == 2
    assert "--score has an effect only with --index" in capsys.readouterr().err
