"""A filtered search gives what filtering the exhaustive ranking gives, and never a
deleted row.
"""

import itertools
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edje_index import TokenIndex
from edje_index.indexing.faiss_build import AnnRequest
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.search.rows import FilterTimeoutError, IndexRows
from pipelines import delete_rows
from pipelines.jobs.quantize import add_ann
from storage_formats import IndexWriter, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_rows
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import write_arrays

ROWS = 700
WIDTH = 6


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Rows with a width, a size and a height; one in 70 has the height 1, one in 7
    has none.
    """
    root = tmp_path_factory.mktemp("filtered") / "i"
    rng = np.random.default_rng(3)
    rows = {
        "uri": [f"{row}.jpg" for row in range(ROWS)],
        "width": [row % 10 for row in range(ROWS)],
        "height": [
            None if row % 7 == 0 else 1 if row % 70 == 1 else 2 for row in range(ROWS)
        ],
        "size": rng.integers(0, 1000, ROWS).tolist(),
    }
    with IndexWriter.create(
        root, block_shape=(2, 8), embed_dim=WIDTH, shard_size=64
    ) as writer:
        blocks = rng.standard_normal((ROWS, 2, 8), dtype=np.float32)
        writer.append(
            blocks, rng.standard_normal((ROWS, WIDTH), dtype=np.float32), rows
        )
    return root


FILTERS = [
    "width > 3 and height = 2",
    "height = 1",
    "height is null or size < 10",
    "row_id = 17",
    "uri like '69_.jpg'",
    "size < 2000",
    "width > 100",
    "not (height = 1)",
]


def exhaustive(root, query, where, k):
    """Row ids by pandas and a full matrix product."""
    rows = read_rows(root).to_pandas()
    condition = {
        "height is null or size < 10": "height.isnull() or size_ < 10",
        "uri like '69_.jpg'": "uri.str.fullmatch('69.[.]jpg')",
        "not (height = 1)": "height.notnull() and height != 1",
    }.get(where, where.replace(" = ", " == ").replace("size", "size_"))
    passing = (
        rows.rename(columns={"size": "size_"}).query(condition)["row_id"].to_numpy()
    )
    similarities = read_embeddings(CommittedIndex.open(root), passing) @ query
    return passing[np.argsort(-similarities, kind="stable")[:k]].tolist()


@pytest.mark.parametrize("factory", ["auto", "IVF10,PQ3x4fs"])
def test_a_filtered_search_is_exact(index, tmp_path, factory):
    shutil.copytree(index, tmp_path / "i")
    add_ann(tmp_path / "i", AnnRequest(factory, recall=0.5))
    delete_rows(tmp_path / "i", rows=[1, 17, 71, 690, *range(100, 200)])
    opened = CommittedIndex.open(tmp_path / "i")
    ann = AnnIndex(opened)
    rows_table = IndexRows(opened)
    queries = np.random.default_rng(5).standard_normal((4, WIDTH), dtype=np.float32)
    for where in FILTERS:
        found = ann.nearest_to_each(queries, 25, rows_table.passing(where))
        for query, (rows, similarities) in zip(queries, found, strict=True):
            assert rows.tolist() == exhaustive(opened.root, query, where, 25), where
            np.testing.assert_allclose(
                similarities, read_embeddings(opened, rows) @ query, atol=1e-5
            )


def test_a_known_filter_does_not_wait_for_another(index):
    rows_table = IndexRows(CommittedIndex.open(index))
    known = rows_table.passing("size < 500")
    with rows_table._filtering, ThreadPoolExecutor(1) as pool:
        assert pool.submit(rows_table.passing, "size < 500").result(timeout=60) is known


def test_a_filter_ends_at_its_time_limit(index):
    rows_table = IndexRows(CommittedIndex.open(index))
    with pytest.raises(FilterTimeoutError, match="took too long"):
        rows_table.passing("size < 500", time.monotonic() - 1)
    assert rows_table.passing("size < 500").any()


def test_hits_pass_the_filter(built):
    index = TokenIndex.open(built[0])

    def rows(hits):
        return [hit.row_id for hit in hits]

    ranked = index.search("a dog", 11, 11, score="embedding")
    even = [row for row in rows(ranked) if row % 2 == 0][:3]
    where = "row_id in (0, 2, 4, 6, 8, 10, 12)"
    assert rows(index.search("a dog", 3, score="embedding", where=where)) == even
    assert {*rows(index.search("a dog", 3, 3, where=where))} == {*even}
    assert index.search(["a dog", "a cat"], where="width > 1000") == [[], []]
    for query in (2, ranked[0].uri):
        hits = index.search_image(query, 9, where="row_id < 4")
        assert {*rows(hits)} == {0, 1, 2, 3} - ({2} if query == 2 else set())
    for search in (index.search, index.search_image):
        with pytest.raises(UsageError, match="no column licence"):
            search("a dog", where="licence = 'cc0'")


def test_rows_that_tie_are_found_whatever_their_number(tmp_path):
    """More rows tie than FAISS keeps: pages of results have each row once."""
    vectors = np.ones((600, WIDTH), np.float32)
    vectors[::7] = np.random.default_rng(1).standard_normal((86, WIDTH))
    write_arrays(
        tmp_path / "i", np.ones((600, 1, 8), np.float32), vectors, shard_size=64
    )
    add_ann(tmp_path / "i", AnnRequest("Flat"))
    ann = AnnIndex(CommittedIndex.open(tmp_path / "i"))
    query = np.ones((1, WIDTH), np.float32)
    found = [
        ann.nearest_to_each(query, k, None)[0][0].tolist() for k in (10, 100, 300, 600)
    ]
    for fewer, more in itertools.pairwise(found):
        assert fewer == more[: len(fewer)]
    assert sorted(found[-1]) == list(range(600))
