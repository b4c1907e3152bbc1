"""More load than the service can take, for a while, with hostile clients mixed in and every answer compared."""

from __future__ import annotations

import json

import pytest

from pipelines.cli import main

QUERIES = [f"{number} red canoes" for number in range(8)]


@pytest.mark.slow
def test_overload_with_hostile_clients(index, tmp_path, capsys):
    (tmp_path / "queries.txt").write_text("\n".join(QUERIES))
    command = ["bench", "serve", str(index), "--queries", str(tmp_path / "queries.txt"), "--pool", "11"]
    command += ["--clients", "1", "--clients", "16", "--seconds", "3", "--overload", "40"]
    code = main([*command, "--report", str(tmp_path / "out"), "--json"])
    report = json.loads(capsys.readouterr().out)
    result = report["overload"]
    assert (code, result["verdict"], result["problems"]) == (0, "no problem", [])
    assert result["compared"] > 100
    assert all(count > 20 for count in result["hostile"].values())
    assert set(result["hostile"]) == {"malformed", "oversized", "slow"}
    (workload,) = report["workloads"]
    assert [load["requests"] > 0 for load in workload["loads"]] == [True] * 7
    assert workload["cold_ms"]["p50_ms"] > 0
    assert report["memory_peak"] >= report["memory_at_start"] > 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".md", ".json", ".png"}
