"""Late-interaction search beside plain NumPy."""

import ml_dtypes
import numpy as np
import pytest
import torch

from edje_index.search.late_interaction_search import LateInteractionSearch, max_sim
from pipelines.jobs.quantize import add_ann
from storage_formats import IndexWriter, TokenStore
from storage_formats.codecs import kernels
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec
from tests.conftest import write_arrays, write_random_index

# more than one batch of scoring
ROWS = 300


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(root, embeddings) of an index written from arrays."""
    root = tmp_path_factory.mktemp("arrays") / "index"
    rng = np.random.default_rng(3)
    blocks = rng.standard_normal((ROWS, 4, 16), dtype=np.float32)
    embeddings = rng.standard_normal((ROWS, 8), dtype=np.float32)
    write_arrays(
        root,
        blocks,
        embeddings,
        [f"page {row}" for row in range(ROWS)],
        precisions=["fp8", "bf16"],
        shard_size=128,
    )
    add_ann(root)
    return root, embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


def plain_scores(query, blocks):
    """MaxSim written out."""
    return np.array(
        [
            sum(max(float(vector @ token) for token in block) for vector in query)
            for block in blocks
        ]
    )


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_scores_and_order_match_plain_numpy(written, precision):
    root, _ = written
    query = np.random.default_rng(3).standard_normal((3, 16), dtype=np.float32)
    expected = plain_scores(
        query, TokenStore.open(root, precision).fetch(range(ROWS)).astype(np.float32)
    )
    index = LateInteractionSearch.open(root, precision)
    np.testing.assert_allclose(
        index.store.max_sim(query, range(ROWS)), expected, rtol=1e-5, atol=1e-5
    )
    hits = index.search(query, k=20, row_ids=range(ROWS))
    best = np.argsort(-expected)[:20]
    assert [(hit.row_id, hit.uri) for hit in hits] == [
        (row, f"page {row}") for row in best
    ]
    assert [hit.score for hit in hits] == pytest.approx(expected[best], rel=1e-5)


@pytest.mark.parametrize(
    ("m", "d", "q"), [(1, 2, 1), (5, 13, 7), (3, 8, 4), (6, 24, 2)]
)
def test_blocks_of_any_shape_with_extreme_values(m, d, q):
    rng = np.random.default_rng(m)
    blocks = rng.standard_normal((40, m, d), dtype=np.float32)
    blocks[[3, 4, 9], :, 0] = [[np.inf], [-np.inf], [1e30]]
    blocks[5, m // 2, -1] = np.nan
    blocks = blocks.astype(ml_dtypes.bfloat16)
    query = rng.standard_normal((-q % 4 + q, d), dtype=np.float32)
    words = blocks.view(np.uint16).reshape(-1)
    scores = np.empty(40, np.float32)
    kernels.max_sim(
        words, np.arange(40) * (m * d), query.reshape(-1), scores, (m, d, q)
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(
            scores, max_sim(query[:q], blocks), rtol=1e-5, atol=1e-5
        )
    assert np.isnan(scores[5])


def test_candidates_come_from_the_embeddings(written):
    root, embeddings = written
    query = np.random.default_rng(9).standard_normal((3, 16), dtype=np.float32)
    embedding = np.random.default_rng(10).standard_normal(8, dtype=np.float32)
    nearest = np.argsort(-(embeddings @ embedding))[:30]
    index = LateInteractionSearch.open(root)
    # the highest fidelity stored, although fp8 was named first
    assert index.store.precision == "bf16"
    # the length of the query does not matter, even if its square is too large
    hits = index.search(query, k=30, embedding=1e30 * embedding, pool=30)
    assert {hit.row_id for hit in hits} == set(nearest.tolist())
    with pytest.raises(UsageError, match="embedding must be numbers"):
        index.search(query, embedding=["a"])
    direction = embedding / np.linalg.norm(embedding)
    assert [hit.embedding_score for hit in hits] == pytest.approx(
        [embeddings[hit.row_id] @ direction for hit in hits]
    )
    again = index.search(query, k=30, row_ids=nearest)
    assert [(hit.row_id, hit.score) for hit in hits] == [
        (hit.row_id, hit.score) for hit in again
    ]
    assert hits[:5] == index.search(query, k=5, embedding=embedding, pool=30)
    for candidates in ({"embedding": embedding, "pool": 300}, {"row_ids": range(300)}):
        few = index.search(query, k=300, where="row_id < 100", **candidates)
        assert {hit.row_id for hit in few} == {*range(100)}


def test_holes_are_left_out(tmp_path):
    write_random_index(tmp_path, IndexSpec(10, 4, (4, 16), 8), failed=frozenset({0, 5}))
    query = np.ones((1, 16), dtype=np.float32)

    def rows(**candidates):
        index = LateInteractionSearch.open(tmp_path)
        hits = index.search(query, k=10, **candidates)
        return sorted(hit.row_id for hit in hits)

    sound = [1, 2, 3, 4, 6, 7, 8, 9]
    assert rows(row_ids=range(10)) == sound
    assert rows(row_ids=[5]) == rows(row_ids=[]) == []
    with pytest.raises(UsageError, match="has no nearest-neighbour index"):
        rows(embedding=np.ones(8))
    add_ann(tmp_path)
    assert rows(embedding=np.ones(8)) == sound


def test_vectors_of_unequal_numbers_fill_their_blocks(tmp_path):
    rng = np.random.default_rng(0)
    vectors = [
        rng.standard_normal((count, 8)).astype(np.float16) for count in (4, 1, 3)
    ]
    with IndexWriter.create(tmp_path / "i", block_shape=(4, 8), embed_dim=8) as writer:
        for wrong in (
            [np.zeros((0, 8))],
            [np.zeros((5, 8))],
            [np.zeros((2, 7))],
            [np.zeros(8)],
        ):
            with pytest.raises(
                UsageError, match=r"blocks\[0\] must have the shape \[1 to 4, 8\]"
            ):
                writer.append(wrong, np.ones((1, 8)))
        writer.append(vectors[:2], np.ones((2, 8)), ["a", "b"])
        writer.append([torch.from_numpy(vectors[2])], np.ones((1, 8)))
    search = LateInteractionSearch.open(tmp_path / "i")
    query = rng.standard_normal((5, 8)).astype(np.float32)
    stored = [torch.from_numpy(each).bfloat16().float().numpy() for each in vectors]
    expected = [float((query @ each.T).max(axis=1).sum()) for each in stored]
    assert search.store.max_sim(query, [0, 1, 2]) == pytest.approx(expected, abs=1e-4)
