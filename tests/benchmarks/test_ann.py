from __future__ import annotations

import numpy as np
import pytest

from benchmarks.ann import AnnBench, Clusters, bench_ann
from edje_index.indexing.faiss_index import AnnRequest


@pytest.mark.slow  # starts four processes
def test_the_report_holds_recall_time_and_memory(tmp_path):
    bench = AnnBench(tmp_path / "ann", rows=3000, width=16, shard_size=1024, request=AnnRequest("IVF20,PQ8x4fs"))
    report = bench_ann(bench)
    assert report["build"]["ann"]["recall"]["value"] >= 0.95
    assert report["append"]["ann"]["vectors"] == 3030
    assert report["search"]["cpu_milliseconds_per_query"] > 0
    assert report["build"]["peak_bytes"] > report["build"]["libraries_bytes"] > 0
    assert not (tmp_path / "ann").exists()


def test_clusters_are_unit_vectors_that_a_seed_determines():
    clusters = Clusters(32, clusters=5)
    vectors = clusters.draw(500, seed=1)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors, clusters.draw(500, seed=1))
    similarities = vectors @ vectors.T
    assert np.percentile(similarities, 95) > 0.4  # a fifth of the pairs is in the same cluster
    assert abs(np.median(similarities)) < 0.3
