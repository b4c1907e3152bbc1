"""`edje-index bench fetch`, the whole command."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys

import pytest

from tests.conftest import REPO

EMPTY_RUN = {"repeat", "discarded", "resident"}
FULL_RUN = EMPTY_RUN | {"blocks", "seconds", "cpu_seconds", "read_bytes", "requested_bytes", "latencies"}


@pytest.fixture
def bench_run(run):
    """Run `edje-index bench ARGUMENTS`; returns exit code, standard output and standard error."""
    return functools.partial(run, "bench")


def check_runs(report):
    for entry in report["precisions"].values():
        for section in entry["sections"].values():
            for found in section["entries"].values():
                assert len(found["runs"]) == report["settings"]["repeats"]
                for measured in found["runs"]:
                    assert set(measured) >= (EMPTY_RUN if measured["discarded"] else FULL_RUN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_everything_on_an_index(index, bench_run, tmp_path):
    options = ["--precision", "bf16", "--precision", "fp8", "--peers", "--repeats", 1, "--seconds", 1]
    code, out, err = bench_run(
        "fetch", index, *options, "--scratch", tmp_path / "s", "--report", tmp_path / "r", "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    check_runs(report)
    sections = report["precisions"]["fp8"]["sections"]
    assert set(sections["cold random"]["entries"]) >= {"device", "edje", "np.memmap"}
    assert list(sections)[-2:] == ["warm random", "warm queries"]
    assert list((tmp_path / "s").iterdir()) == []
    assert {path.suffix for path in (tmp_path / "r").iterdir()} == {".md", ".json"}


@pytest.mark.slow
def test_cold_fetches_from_a_synthetic_index(index, bench_run, tmp_path):
    options = ["--synthetic", 40, "--cold", "--repeats", 1, "--precision", "fp8", "--scratch", tmp_path / "s"]
    options += ["--targets"]
    code, out, err = bench_run("fetch", *options, "--report", tmp_path / "r", "--json")
    assert code == 0, err
    report = json.loads(out)
    check_runs(report)
    assert set(report) == {
        *("environment", "settings", "device", "notes", "precisions", "targets", "joint_encoder", "verdict")
    }
    entry = report["precisions"]["fp8"]
    assert set(entry["sections"]) == {"cold random", "cold contiguous", "cold queries"}
    assert entry["rows"] == 40
    assert {"device", "edje", "edje, rows in list order"} <= set(entry["sections"]["cold queries"]["entries"])
    assert "cold random bf16" not in err
    assert "cold random fp8 1/1" in err
    assert len(report["verdict"]) == 1
    assert list((tmp_path / "s").iterdir()) == []
    (text,) = (tmp_path / "r").glob("*.md")
    for words in (
        "## Verdict",
        "## Targets",
        "cold random, relative to the device",
        "20 random blocks in one call, cold",
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
