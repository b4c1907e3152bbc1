"""The comparison of whole systems, on a small index of random photos."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.end_to_end import (
    SYSTEMS,
    Collection,
    bench_end_to_end,
    report_lines,
    write_collection,
)
from edje_index.evaluation.report import write_report
from edje_index.search.token_index import TokenIndex
from storage_formats import UsageError
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
    count = len(collection.tokens)
    for query, exact in zip(collection.queries, collection.exact(count), strict=True):
        hits = index.search(query.text, count, count, score="late")
        scores = {hit.row_id: hit.score for hit in hits}
        ranked = [scores[int(collection.row_ids[position])] for position in exact]
        # tokens are rounded to bfloat16
        np.testing.assert_allclose(ranked, sorted(ranked, reverse=True), atol=5e-3)


def test_repeated_images_have_noise(index, collection, tmp_path):
    count = len(collection.tokens)
    write_collection(
        tmp_path, index, [(TEXTS[0], int(collection.row_ids[0]))], rows=2 * count
    )
    repeated = Collection.open(tmp_path)
    for values in (repeated.tokens.astype(np.float32), repeated.embeddings):
        cosines = (values[:count] * values[count:]).sum(axis=-1)
        np.testing.assert_allclose(np.square(values).sum(axis=-1), 1, atol=0.02)
        assert 0.8 < cosines.min() <= cosines.max() < 0.999
    np.testing.assert_array_equal(repeated.tokens[:count], collection.tokens)


@pytest.mark.parametrize(
    "name",
    [
        "edje-index bf16",
        "FAISS and np.memmap",
        "FAISS and TensorStore",
        "Qdrant Edge",
        "Lance exact",
    ],
)
def test_a_whole_pool_gives_the_exact_order(collection, tmp_path, name):
    pytest.importorskip(SYSTEMS[name].package)
    system = SYSTEMS[name](tmp_path, collection)
    system.build()
    system.open()
    for query, exact in zip(collection.queries, collection.exact(3), strict=True):
        found = system.search(query, 3, len(collection.tokens))
        assert found == exact
        assert len(system.search(query, 3, 3)) == 3


# starts six processes
@pytest.mark.slow
def test_the_report_has_a_row_for_each_effort(tmp_path, monkeypatch):
    systems = ("edje-index bf16", "edje-index bf16, joint encoder")
    for name in systems:
        monkeypatch.setattr(SYSTEMS[name], "efforts", (4, 8))
    options = {
        "images": "/photos",
        "model": GOLDEN / "model",
        "systems": systems,
        "queries": 4,
        "limit": 300,
    }
    report = bench_end_to_end(
        GOLDEN / "index",
        GOLDEN / "captions.jsonl",
        tmp_path / "systems",
        print,
        **options,
    )
    assert [
        [run["effort"] for run in system["runs"]] for system in report["systems"]
    ] == [[4, 8], [4, 8]]
    assert all(
        run["memory_bytes"] > 0
        for system in report["systems"]
        for run in system["runs"]
    )
    assert not (tmp_path / "systems").exists()
    text = "\n".join(report_lines(report))
    write_report(tmp_path, text, report, "end-to-end")
    assert "| edje-index bf16 | pool 4 |" in (tmp_path / "end-to-end.md").read_text()
    written = json.loads((tmp_path / "end-to-end.json").read_text())
    assert written["collection"]["images"] > 0


def test_senseless_requests_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for systems, message in ((("Solr",), "no system 'Solr'"), ((), "is not empty")):
        with pytest.raises(UsageError, match=message):
            bench_end_to_end(
                GOLDEN / "index",
                GOLDEN / "captions.jsonl",
                tmp_path,
                print,
                systems=systems,
            )
