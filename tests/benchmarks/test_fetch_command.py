"""`edje-index bench fetch`, the whole command."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks import fetch
from benchmarks.harness import DEVICE, report_lines
from tests.benchmarks.test_harness import ABOUT, WHERE
from tests.conftest import REPO, write_random_index
from tests.storage_formats.reading_cases import ODD


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_everything_on_an_index(index, run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run(
        "bench", "fetch", index, "--quick", "--report", tmp_path / "r", "--json"
    )
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["group"] for row in rows} == {"bf16", "fp8"}
    assert any(" 100 per call" in row["table"] for row in rows)
    for row in rows:
        assert row["command"]
    measured = {(row["subject"], row["case"]) for row in rows if row["values"]}
    assert {("edje-index", "cold"), ("np.memmap", "warm")} <= measured
    assert ("edje-index records", "warm") in measured
    assert (DEVICE, "cold") in measured or shutil.which("fio") is None
    assert re.search(r"^1/\d+, \d+ min left: ", err, re.MULTILINE)
    assert "warning: bf16, fp8: only the first 300 rows are read" in err
    assert list(index.parent.iterdir()) == [index]
    picture, text, data = sorted((tmp_path / "r").iterdir(), reverse=True)
    text = text.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"({picture.name})" in text
    assert "bf16: " in text
    assert "queries of 100 photos per second" in text
    assert (
        "## 150 random blocks in one call, cold, GB/s (edje-index / row)\n\n|" in text
    )
    assert str(tmp_path) not in data.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere"], "no index at nowhere"),
        (
            ["INDEX", "--precision", "nvfp4"],
            "does not have precision 'nvfp4'; choose one of: bf16, fp8",
        ),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(
    run, index, tmp_path, monkeypatch, options, words
):
    monkeypatch.chdir(tmp_path)
    err = run.refused(
        "bench", "fetch", *(index if each == "INDEX" else each for each in options)
    )
    assert words in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_report_is_printed_as_it_is_written(run, monkeypatch):
    report = {**ABOUT, "command": "x", "environment": WHERE, "verdict": [], "rows": []}
    monkeypatch.setattr(fetch, "bench_fetch", lambda index, **_: report)
    assert run.ok("bench", "fetch", "x") == "\n".join(report_lines(report)) + "\n"


def test_an_index_without_rows_is_refused(run, tmp_path):
    root = tmp_path / "index"
    write_random_index(root, ODD)
    run.ok("delete", root, "--where", "row_id >= 0")
    assert "has no blocks to fetch" in run.refused("bench", "fetch", root, "--quick")
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.slow
def test_an_interrupted_run_continues(index, run):
    options = ["--precision", "fp8", "--repeats", "1", "--pool", "20"]
    command = [sys.executable, "-m", "pipelines.cli", "bench", "fetch", str(index)]
    with subprocess.Popen(
        [*command, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    ) as process:
        while not process.stderr.readline().startswith("3/"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    resume = f"edje-index bench fetch {index} {' '.join(options)}"
    assert err.splitlines()[-1] == f"error: interrupted. To resume: {resume}"
    code, out, err = run("bench", "fetch", index, *options, "--json")
    assert code == 0, err
    assert "\n1/" not in err
    assert re.search(
        "^[23] runs were measured before an interruption", err, re.MULTILINE
    )
    assert json.loads(out)["rows"]
    assert list(index.parent.iterdir()) == [index]
