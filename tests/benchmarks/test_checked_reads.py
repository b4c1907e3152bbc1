"""The benchmark of checked reads: what it fetches, and the lines that it prints."""

from __future__ import annotations

import sys
import time

import pytest

from benchmarks.checked_reads import Setting, measure, table_line
from benchmarks.synthetic import make_synthetic
from storage_formats import IndexSpec
from storage_formats.reading import engines


@pytest.mark.skipif(sys.platform != "linux", reason="evicts files from the page cache")
@pytest.mark.parametrize("is_cold", [False, True])
def test_each_round_measures_both_kinds(tmp_path, is_cold):
    if is_cold and "io_uring" not in engines():
        pytest.skip("no io_uring here")
    make_synthetic(tmp_path / "index", IndexSpec(70, 32, (4, 128), embed_dim=4, precisions=("bf16", "fp8")))
    seconds = measure(tmp_path / "index", Setting("fp8", is_cold, 10, 3), time.perf_counter)
    assert len(seconds) == 3
    assert min(min(pair) for pair in seconds) > 0


def test_the_ratio_is_unchecked_over_checked():
    line = table_line(Setting("bf16", False, 100, 3), [(1e-4, 2e-4), (1e-4, 1e-4), (2e-4, 8e-4)])
    assert line == "| `bf16` | warm | 100 | 1.00 | 2.00 | 0.500 |"
