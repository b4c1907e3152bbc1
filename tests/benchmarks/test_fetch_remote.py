"""`bench fetch` on an S3-compatible server: requests are counted."""

from __future__ import annotations

import json

import pytest

from benchmarks.fetch import remote
from pipelines import copy_index
from storage_formats import IndexSpec
from tests.conftest import write_random_index
from tests.object_store import FaultyProxy, s3_server, use_endpoint

URL = "s3://bucket/photos.edje"
SPEC = IndexSpec(rows=60, shard_size=32, block_shape=(4, 8), embed_dim=4, precisions=("bf16", "fp8"))


@pytest.mark.slow  # it starts a server
def test_readers_are_measured_side_by_side(tmp_path, monkeypatch, run):
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    write_random_index(tmp_path / "photos.edje", SPEC)
    with s3_server() as server, FaultyProxy(server).running() as proxy:
        use_endpoint(monkeypatch, server)
        copy_index(tmp_path / "photos.edje", URL)
        monkeypatch.setattr(remote, "_QUERIES", 5)
        arguments = ("bench", "fetch", URL, "--pool", 20, "--repeats", 1, "--precision", "fp8", "--json")
        code, out, err = run(*arguments, "--report", tmp_path / "report")
        assert code == 0, err
        use_endpoint(monkeypatch, proxy.url)
        assert run(*arguments)[0] == 0
    result = json.loads(out)
    assert set(result["readers"]) == {"edje", "edje, cached"}
    for reader in result["readers"].values():
        assert reader["gigabytes_per_second"] > 0
        assert 0 < reader["query_p50_ms"] <= reader["query_p99_ms"]
    (report,) = (tmp_path / "report").glob("*-fetch-url.md")
    assert "requests and" in report.read_text()
    assert "USD per million queries" in report.read_text()
    assert [json.loads(path.read_text()) for path in (tmp_path / "report").glob("*.json")] == [result]
    assert (result["blocks"], result["query_blocks"]) == (20, 20)
    assert 1 <= result["requests_per_query"] <= 2  # two shards, whose gaps are read too
    assert result["dollars_per_million_queries"] == pytest.approx(0.4 * result["requests_per_query"])
    assert proxy.count("GET", "tokens/fp8/c.") >= 10 * result["requests_per_query"]  # 5 queries, twice
