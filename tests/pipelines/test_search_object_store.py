"""Searches of an index on an S3-compatible server give the hits of the local index."""

from __future__ import annotations

import json

import pytest

from edje_index import TokenIndex
from pipelines import copy_index, delete_rows
from tests.edje_index.search.indexes import build_photos
from tests.object_store import use_endpoint

pytestmark = pytest.mark.slow  # they start a server
URL = "s3://bucket/photos.edje"


@pytest.fixture
def remote(tmp_path, monkeypatch, server):
    """A directory with an index of photos, and the index at `URL`."""
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "search").mkdir()
    root, _ = build_photos(tmp_path / "search")
    use_endpoint(monkeypatch, server)
    copy_index(root, URL)
    return root


def test_hits_equal_those_of_the_local_index(remote, run):
    local, index = TokenIndex.open(remote), TokenIndex.open(URL)
    assert list(index.search("a dog", k=3)) == list(local.search("a dog", k=3))
    first = local.search("a dog", k=1)[0].row_id
    delete_rows(remote, rows=[first])
    copy_index(remote, URL)
    assert index.search("a dog", k=1)[0].row_id == first
    assert index.refresh() == 1
    assert first not in [hit.row_id for hit in index.search("a dog", k=5)]

    _, out, _ = run("search", URL, "a dog", "-k", 2, "--json")
    _, expected, _ = run("search", remote, "a dog", "-k", 2, "--json")
    assert json.loads(out)["hits"] == json.loads(expected)["hits"]
    code, out, _ = run("info", URL, "--json")
    _, expected, _ = run("info", remote, "--json")
    assert code == 0
    assert {**json.loads(out), "index": ""} == {**json.loads(expected), "index": ""}
