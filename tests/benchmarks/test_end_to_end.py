"""The comparison of whole systems, on a small index of random photos."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from benchmarks import end_to_end
from benchmarks.end_to_end import (
    SYSTEMS,
    Collection,
    bench_end_to_end,
    report_lines,
    write_collection,
)
from benchmarks.fetch.peers import installed_version
from edje_index.evaluation.report import write_report
from edje_index.search.token_index import TokenIndex
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
# The bundle of release 0.1 names a hubness correction.
pytestmark = pytest.mark.filterwarnings("ignore:.*hubness correction:RuntimeWarning")
TEXTS = ["a dog plays in the snow", "of the", "two red boats on a lake"]


@pytest.fixture(scope="module")
def index() -> TokenIndex:
    return TokenIndex.open(GOLDEN / "index", GOLDEN / "model")


@pytest.fixture(scope="module")
def collection(index, tmp_path_factory) -> Collection:
    folder = tmp_path_factory.mktemp("collection")
    row_id = index.search("a dog", 1, 4)[0].row_id
    write_collection(folder, index, [(text, row_id) for text in TEXTS])
    return Collection.open(folder)


def test_the_vectors_rank_as_late_interaction(index, collection):
    assert [query.text for query in collection.queries] == [
        TEXTS[0],
        TEXTS[2],
    ], "no content word, no query"
    count = len(collection.row_ids)
    for query, exact in zip(collection.queries, collection.exact(count), strict=True):
        hits = index.search(query.text, count, count, score="late")
        scores = {hit.row_id: hit.score for hit in hits}
        ranked = [scores[int(collection.row_ids[position])] for position in exact]
        # tokens are rounded to bfloat16
        np.testing.assert_allclose(ranked, sorted(ranked, reverse=True), atol=5e-3)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_whole_pool_gives_the_exact_order(collection, tmp_path, name):
    system = SYSTEMS[name]
    store = getattr(system, "store", None)
    if store and installed_version(store) is None:
        pytest.skip(f"{store} is not installed")
    files = system.build(collection, tmp_path)
    assert all(path.is_file() for path in files)
    system.open(collection, tmp_path)
    count = len(collection.row_ids)
    for query, exact in zip(collection.queries, collection.exact(3), strict=True):
        found = system.search(query, 3, count)
        # the other precisions are not exact
        assert found == exact or "edje-index" in name
        assert len(found) == len(system.search(query, 3, 3)) == 3
    if name == "edje-index bf16":
        assert found == exact


# starts many processes
@pytest.mark.slow
def test_the_report_has_a_row_for_each_system_and_pool(tmp_path, monkeypatch):
    names = ("edje-index bf16", "FAISS and np.memmap")
    monkeypatch.setattr(end_to_end, "SYSTEMS", {name: SYSTEMS[name] for name in names})
    monkeypatch.setattr(end_to_end, "POOLS", (4, 8))
    report = bench_end_to_end(
        GOLDEN / "index",
        GOLDEN / "captions.jsonl",
        tmp_path / "systems",
        print,
        images="/photos",
        model=GOLDEN / "model",
        queries=4,
    )
    assert [
        [run["pool"] for run in system["runs"]] for system in report["systems"]
    ] == [[4, 8]] * 2
    for system in report["systems"]:
        assert system["bytes_per_image"] > 0
        assert all(run["memory_bytes"] > 0 for run in system["runs"])
    assert not list((tmp_path / "systems").iterdir())
    text = "\n".join(report_lines(report))
    write_report(tmp_path, text, report, "end-to-end")
    text = (tmp_path / "end-to-end.md").read_text()
    assert re.search(r"^\| edje-index bf16 +\| +4 \|", text, re.MULTILINE)
    written = json.loads((tmp_path / "end-to-end.json").read_text())
    assert written["collection"]["images"] > 0
