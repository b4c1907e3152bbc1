"""Searches of two checkouts side by side: here the repository and itself, or a checkout that cannot run."""

from __future__ import annotations

import pytest

from benchmarks.search_side_by_side import Way, Workload, measure, table_lines
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
WORKLOAD = Workload(GOLDEN / "index", GOLDEN / "model", ["a dog", "two dogs"], pool=10)


@pytest.mark.slow  # starts three processes
def test_every_way_is_measured_at_every_start(tmp_path):
    ways = [Way("old", REPO, {"dtype": "bfloat16"}), Way("new", REPO, {"joint_pool": 2})]
    times = measure(ways, WORKLOAD, starts=1)
    assert list(times) == ["old", "new"]
    assert all(len(starts) == 1 and len(starts[0]) == 2 and min(map(min, starts[0])) > 0 for starts in times.values())
    (tmp_path / "edje_index.py").write_text("")
    with pytest.raises(RuntimeError, match="ended early"):
        measure([Way("broken", tmp_path, {})], WORKLOAD, starts=1)


def test_a_ratio_compares_with_the_first_way():
    times = {"old": [[(40.0, 60.0)], [(60.0, 80.0)]], "new": [[(10.0, 20.0)], [(20.0, 20.0)]]}
    assert table_lines(times)[2:] == [
        "| old | 50.0 | 70.0 | 1.00 | 1.00 to 1.00 |",
        "| new | 15.0 | 20.0 | 3.50 | 3.00 to 4.00 |",
    ]
