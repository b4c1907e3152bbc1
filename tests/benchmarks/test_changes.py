"""The benchmark of changes: it appends and deletes, and compares what was before."""

from __future__ import annotations

import sys

import pytest

from benchmarks.changes import AppendBench, append_lines, bench_append
from benchmarks.deletion import DeletionBench, deletion_lines
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats.errors import UsageError
from storage_formats.reading import engines
from tests.integration.builds import make_photos


@pytest.mark.slow  # imports FAISS and compiled kernels
@pytest.mark.skipif(sys.platform != "linux", reason="evicts files from the page cache")
def test_reads_before_and_after_a_deletion(tmp_path):
    if "io_uring" not in engines():
        pytest.skip("no io_uring here")
    (tmp_path / "changes").mkdir()
    lines = list(deletion_lines(DeletionBench(tmp_path, fetched=40, searched=(300,), rounds=3)))
    tasks = [line.split(" | ")[0] for line in lines[2:]]
    assert tasks == ["| fetch 100 rows, warm", "| fetch 400 rows, cold", "| search 300 rows (flat)"]
    assert lines[-1].endswith("| 1.0000 | 1.0000 |")
    assert list(tmp_path.iterdir()) == [tmp_path / "changes"]


def test_the_share_of_a_step_is_the_median_over_the_rounds():
    rounds = [
        {"build": dict.fromkeys(keys, 100 << 20), "append": dict.fromkeys(keys, share << 20)}
        for share in (1, 2, 9)
        for keys in [("wall", "cpu", "peak_largest_rss")]
    ]
    for costs in rounds:
        costs["append of one photo"] = costs["append"]
    assert list(append_lines(rounds))[3].endswith("| 2.0 | 2.0% | 2.0% | 2.0% |")


def test_too_few_photos_are_refused(tmp_path):
    make_photos(tmp_path / "photos", 3)
    with pytest.raises(UsageError, match=r"has 3 files \*.jpg, but 4 are needed"):
        bench_append(AppendBench(tmp_path / "photos", tmp_path, tmp_path / "bench", images=2))
    assert not (tmp_path / "bench").exists()


@pytest.mark.slow  # starts three builds and appends
def test_an_append_is_measured_beside_a_build(tmp_path):
    make_photos(tmp_path / "photos", 5)
    create_untrained_bundle(tmp_path / "model", sizes=TINY)
    (tmp_path / "bench/changes").mkdir(parents=True)
    bench = AppendBench(tmp_path / "photos", tmp_path / "model", tmp_path / "bench", images=3, repeats=1)
    (costs,) = bench_append(bench)
    assert [cost["stdout"]["indexed"] for cost in costs.values()] == [3, 1, 1]
    assert costs["append"]["cpu"] > 0
    assert list((tmp_path / "bench").iterdir()) == [tmp_path / "bench/changes"]
