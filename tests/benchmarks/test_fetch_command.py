"""`edje-index bench fetch`, the whole command."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys

import pytest

from tests.conftest import REPO

RUN = {
    "repeat",
    "discarded",
    "resident",
    "blocks",
    "seconds",
    "cpu_seconds",
    "read_bytes",
    "requested_bytes",
    "latencies",
}


@pytest.fixture
def bench_run(run):
    """Run `edje-index bench ARGUMENTS`; returns exit code, standard output and standard error."""
    return functools.partial(run, "bench")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", ["index", "synthetic"])
def test_every_section_is_measured_and_reported(index, bench_run, tmp_path, source):
    where = [index] if source == "index" else ["--synthetic", 300]
    options = [
        "--precision",
        "fp8",
        "--peers",
        "--repeats",
        1,
        "--seconds",
        1,
        "--targets",
        "--scratch",
        tmp_path / "s",
    ]
    code, out, err = bench_run("fetch", *where, *options, "--report", tmp_path / "r", "--json")
    assert code == 0, err
    report = json.loads(out)
    fields = ("environment", "settings", "device", "notes", "precisions", "targets", "joint_encoder", "verdict")
    assert set(report) == set(fields)
    (entry,) = report["precisions"].values()
    assert [*entry["sections"]] == ["cold random", "cold contiguous", "cold queries", "warm random", "warm queries"]
    assert {"device", "edje", "np.memmap"} <= set(entry["sections"]["cold random"]["entries"])
    for section in entry["sections"].values():
        for measured in section["entries"].values():
            (run,) = measured["runs"]
            assert run["discarded"] or set(run) == RUN
    assert "cold random fp8 1/1" in err
    assert (entry["rows"], len(report["verdict"])) == (300, 1)
    assert list((tmp_path / "s").iterdir()) == []
    (text,) = (tmp_path / "r").glob("*.md")
    for words in (
        "## Verdict",
        "## Targets",
        "cold random, relative to the device",
        "150 random blocks in one call, cold",
    ):
        assert words in text.read_text()
    assert str(tmp_path) not in text.with_suffix(".json").read_text()


def test_with_a_model_the_verdict_says_what_is_needed(index, bench_run, tmp_path):
    model = tmp_path / "model"
    from edje_index.bundles.random_bundle import TINY, create_untrained_bundle

    create_untrained_bundle(model, sizes=TINY)
    options = ["--warm", "--repeats", 1, "--model", model, "--scratch", tmp_path / "s", "--pool", 8]
    code, out, err = bench_run("fetch", index, *options)
    assert code == 0, err
    assert "warm fetches deliver" in out
    assert "pairs/s that the joint encoder (batch" in out
    assert "met " not in out.lower()  # targets are shown only with --targets
    assert "warning: bf16 holds 1.2 MB" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give either INDEX or --synthetic N"),
        (["--synthetic", 10], "--synthetic needs --scratch"),
        (["--synthetic", 10**9, "--scratch", "s"], "GB free, but the benchmark needs 5"),
        (["--synthetic", 10, "--scratch", "s", "--precision", "fp7"], "fp7"),
        (
            ["--synthetic", 10, "--scratch", "s", "--engine", "steam"],
            "engine 'steam' is not available",
        ),
        (["nowhere"], "no index at nowhere"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(bench_run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = bench_run("fetch", *options)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_precision_that_the_index_lacks_is_refused(bench_run, index, tmp_path):
    code, _, err = bench_run("fetch", index, "--precision", "nvfp4", "--scratch", tmp_path)
    assert code == 2
    assert "does not have precision 'nvfp4', only bf16, fp8" in err


def test_nothing_is_left_behind_when_it_is_stopped(index, tmp_path):
    options = ["--synthetic", "40", "--cold", "--scratch", str(tmp_path)]
    command = [sys.executable, "-m", "pipelines.cli", "bench", "fetch", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO) as process:
        while not process.stderr.readline().startswith("cold random bf16 1/5"):
            assert process.poll() is None
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1] == "error: interrupted"
    assert list(tmp_path.iterdir()) == []
