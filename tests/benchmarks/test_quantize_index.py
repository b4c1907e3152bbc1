from __future__ import annotations

import pytest

from benchmarks.quantize_index import QuantizeBench, bench_quantize_index
from storage_formats import UsageError, codec


@pytest.mark.slow
def test_bytes_moved_are_those_of_both_precisions(tmp_path):
    report = bench_quantize_index(QuantizeBench(tmp_path, rows=40, to="nvfp4", repeats=2))
    quantize, copy = report["runs"]["quantize"], report["runs"]["cp"]
    assert len(quantize) == len(copy) == 2
    records = 40 * (codec("bf16").record_bytes + codec("nvfp4").record_bytes)
    for run in quantize:
        assert records < run["bytes"] < records + 3 * 2**15  # two shard indexes of 16 KiB, and padding
        assert 0 < run["seconds"] < run["wall_seconds"]
        assert run["resident_before"] <= 0.01
    assert copy[0]["bytes"] == pytest.approx(2 * 40 * codec("bf16").record_bytes, rel=0.05)
    assert set(report["ratios"]) == {"quantize / cp", "quantize with start / cp"}
    assert report["ratios"]["quantize with start / cp"] < report["ratios"]["quantize / cp"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="choose another precision"):
        bench_quantize_index(QuantizeBench(tmp_path, rows=40, to="bf16"))
