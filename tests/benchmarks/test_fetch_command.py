"""`edje-index bench fetch`, the whole command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from benchmarks.fetch.bench import FIO
from tests.conftest import REPO

EMPTY_RUN = {"repeat", "discarded"}
FULL_RUN = EMPTY_RUN | {
    "blocks",
    "seconds",
    "cpu_seconds",
    "read_bytes",
    "requested_bytes",
    "latencies",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_everything_on_an_index(index, run, tmp_path):
    options = [
        "--precision",
        "bf16",
        "--precision",
        "fp8",
        "--peers",
        "--repeats",
        1,
    ]
    code, out, err = run(
        "bench", "fetch", index, *options, "--report", tmp_path / "r", "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    for entry in report["precisions"].values():
        assert entry["rows"] == 300
        sections = entry["sections"]
        assert list(sections) == [
            "cold random",
            "cold contiguous",
            "cold queries",
            "warm random",
            "warm queries",
        ]
        assert set(sections["cold random"]["entries"]) >= {FIO, "edje", "np.memmap"}
        for section in sections.values():
            for found in section["entries"].values():
                (measured,) = found["runs"]
                assert set(measured) >= (
                    EMPTY_RUN if measured["discarded"] else FULL_RUN
                )
    assert "cold random fp8 1/1" in err
    assert "warning: bf16 holds 1.2 MB" in err
    assert list(index.parent.iterdir()) == [index]
    text, data = sorted((tmp_path / "r").iterdir(), reverse=True)
    assert "### 150 random blocks in one call, cold" in text.read_text()
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
    code, out, err = run(
        "bench", "fetch", *(index if each == "INDEX" else each for each in options)
    )
    assert (code, out) == (2, "")
    assert words in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_nothing_is_left_behind_when_it_is_stopped(index):
    options = [str(index), "--cold", "--peers"]
    command = [sys.executable, "-m", "pipelines.cli", "bench", "fetch", *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO
    ) as process:
        while not process.stderr.readline().startswith("cold random bf16 1/5"):
            assert process.poll() is None
        assert len(list(index.parent.iterdir())) == 2
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error: interrupted"
    assert list(index.parent.iterdir()) == [index]
