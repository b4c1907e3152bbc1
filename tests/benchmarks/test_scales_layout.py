from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scales_layout import CODES, RECORD, VARIANTS, _fetch, _write, bench_scales_layout
from storage_formats import UsageError, codec


def test_the_sizes_are_those_of_the_format():
    entry = codec("nvfp4")
    assert (entry.codes_bytes, entry.record_bytes) == (CODES, RECORD)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_each_layout_reads_its_own_records(tmp_path, variant):
    path = tmp_path / "file"
    _write(path, variant, 600)
    data = np.fromfile(path, dtype=np.uint8).reshape(600, variant.stride)
    ids = np.sort(np.random.default_rng(0).choice(600, 300, replace=False))
    out = np.zeros((300, RECORD), dtype=np.uint8)
    _fetch(path, variant, ids, out)
    assert (out[:, : variant.read] == data[ids, : variant.read]).all()
    assert not out[:, variant.read :].any()


def test_the_report(tmp_path):
    report = bench_scales_layout(tmp_path, rows=600, blocks=100, repeats=2)
    read = {name: found["bytes_read_per_block"] for name, found in report["median"].items()}
    assert read["memory"] >= CODES  # each page comes from the disk
    assert read["record"] > read["memory"]
    assert report["per_million_images"]["memory"]["memory_gb"] == pytest.approx(1.536)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="choose more rows"):
        bench_scales_layout(tmp_path, rows=10, blocks=11, repeats=1)
