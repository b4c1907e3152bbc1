"""Two checkouts side by side: here the repository and itself, or a checkout that cannot run."""

from __future__ import annotations

import pytest

from benchmarks.side_by_side import Options, measure, table_lines, write_index
from tests.conftest import REPO


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("side") / "index"
    write_index(root, rows=250)
    return root


@pytest.mark.slow
def test_every_task_is_measured_for_both_checkouts(root):
    seconds = measure((REPO, REPO), root, Options(starts=2, rounds=1, blocks=2))
    assert len(seconds) == 7 * 2 + 3 * 2 * 2
    assert all(len(pairs) == 2 and min(map(min, pairs)) > 0 for pairs in seconds.values())


def test_tasks_are_selected_by_their_words(root):
    assert set(measure((REPO, REPO), root, Options(starts=1, rounds=1, blocks=2, words="fetch 100"))) == {
        f"fetch 100 {name}{variant}" for name in ("bf16", "fp8", "nvfp4") for variant in ("", " unchecked")
    }


def test_a_checkout_that_cannot_run_is_an_error(root, tmp_path):
    (tmp_path / "storage_formats.py").write_text("")
    with pytest.raises(RuntimeError, match="ended early"):
        measure((tmp_path, REPO), root, Options(starts=1, rounds=1, blocks=2))


def test_the_ratio_is_old_over_new():
    line = table_lines({"encode fp8": [(0.002, 0.001), (0.004, 0.002), (0.006, 0.006)]})[-1]
    assert line == "| encode fp8 | 4.00 | 2.00 | 2.000 |"


@pytest.mark.slow
def test_cold_fetches_are_measured_alone(root):
    seconds = measure((REPO, REPO), root, Options(starts=1, rounds=1, blocks=2, words="nvfp4", cold=True))
    assert set(seconds) == {"cold fetch nvfp4", "cold fetch nvfp4 unchecked"}
