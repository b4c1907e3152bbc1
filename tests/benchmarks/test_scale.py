from __future__ import annotations

import pytest

from benchmarks.scale import bench_scale
from storage_formats.errors import UsageError


@pytest.mark.slow  # starts ten processes
def test_every_step_runs_and_its_memory_is_measured(tmp_path):
    report = bench_scale(tmp_path / "scale", (2048, 10_000_000))
    small, large = report["rows"].values()
    assert (large["fetch"]["blocks"], large["append"]["snapshot"]) == (100, 1)
    assert large["plan"]["shards"] == 9766
    assert large["open"]["rows"] == 10_000_000
    assert 990 < large["delete"]["deleted"] <= 1000
    for step, result in large.items():
        assert result["peak_bytes"] < small[step]["peak_bytes"] + (64 << 20), step
    assert not (tmp_path / "scale").exists()


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "photo").touch()
    with pytest.raises(UsageError, match="is not empty; choose a new folder"):
        bench_scale(tmp_path, (10,))
    assert (tmp_path / "photo").exists()
