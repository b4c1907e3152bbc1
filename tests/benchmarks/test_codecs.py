from __future__ import annotations

import pytest

from benchmarks.codecs import bench_codecs
from storage_formats import precisions


@pytest.mark.filterwarnings("ignore")  # torchao's, where it is installed
def test_every_precision_is_measured_beside_its_peers(tmp_path):
    report = bench_codecs(tmp_path, blocks=2, repeats=2, threads=1)
    compiled = [name for name in precisions() if name != "bf16"]
    assert set(report["median"]) == {
        "gather",
        *(f"{task} {name}" for task in ("encode", "decode") for name in compiled),
    }
    assert set(report["median"]["gather"]) == set(precisions())
    for task, rates in report["gb_per_s"].items():
        assert all(len(found) == 2 and min(found) > 0 for found in rates.values()), task
    assert {"edje / torch cast", "edje / torch scaled", "edje / ml_dtypes cast"} <= set(report["ratios"]["decode fp8"])
    assert report["ratios"]["gather"]["fp8 / bf16"] > 0
