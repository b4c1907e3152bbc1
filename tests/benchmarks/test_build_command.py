"""`edje-index bench build`, as a user runs it."""

from __future__ import annotations

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from tests.command_line import run_process
from tests.integration.builds import make_photos

pytestmark = pytest.mark.slow


def test_relative_paths(tmp_path, monkeypatch):
    make_photos(tmp_path / "photos", 4)
    create_untrained_bundle(tmp_path / "model", sizes=TINY)
    monkeypatch.chdir(tmp_path)
    options = ["--model", "model", "--folder", "bench", "--images", 8, "--repeats", 1, "--engine", "inline"]
    report = run_process("bench", "build", "photos", *map(str, options))
    assert report["runs"]["inline"][0]["stdout"]["indexed"] == 8
    assert report["runs"]["bare loop"][0]["stdout"]["images"] == 8
    assert set(report["summary"]) == {"bare loop", "inline"}
    assert set(report["summary"]["bare loop"]["stage_seconds"]) == {"decode", "encode"}
    assert set(report["summary"]["inline"]["stage_seconds"]) == {"read", "decode", "wait", "encode", "write"}
    assert all(0 < row["flop_share"] < 1 for row in report["summary"].values())
