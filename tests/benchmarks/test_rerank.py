from __future__ import annotations

import json

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines.cli import main
from storage_formats.threads import usable_cpus


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("rerank") / "model"
    create_untrained_bundle(path, sizes=TINY)
    return path


def test_the_command_prints_one_object(model, capsys):
    arguments = ["--model", model, "--device", "cpu", "--dtype", "bfloat16", "--json"]
    assert main(["bench", "rerank", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    median = report["joint_encoder"]["median"]
    threads = sorted({1, usable_cpus()})
    assert list(median) == [
        f"batch {batch}, {count} threads"
        for count in threads
        for batch in (1, 32, 64, 128)
    ]
    assert all(rate > 0 for rate in median.values())
    assert report["dtype"] == "bfloat16"


def test_senseless_requests_are_refused(model, index, capsys):
    arguments = ["--model", model, "--index", index]
    assert main(["bench", "rerank", *map(str, arguments)]) == 2
    assert "no nearest-neighbour index" in capsys.readouterr().err
    assert main(["bench", "rerank", "--model", str(model), "--score", "logit"]) == 2
    assert "--score has an effect only with --index" in capsys.readouterr().err
