from __future__ import annotations

import faiss
import numpy as np
import pytest

from edje_index.errors import ModelError
from edje_index.indexing import faiss_index as ann
from edje_index.indexing.faiss_index import AnnIndex, build_ann
from storage_formats import CorruptIndexError
from storage_formats.format.layout import IndexSpec
from storage_formats.reading.embeddings import iter_embeddings
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=300, shard_size=64, block_shape=(2, 4), embed_dim=12)
HOLES = frozenset({0, 70, 299})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    write_random_index(folder, SPEC, failed=HOLES)
    return folder


def embeddings(root):
    return np.concatenate([vectors for _, vectors in iter_embeddings(root, SPEC)])


@pytest.mark.parametrize("flat_limit", [1000, 100], ids=["flat", "ivf"])
def test_nearest_rows_are_those_of_a_flat_search(root, monkeypatch, flat_limit):
    monkeypatch.setattr(ann, "FLAT_LIMIT", flat_limit)
    monkeypatch.setattr(ann, "_IVF_PROBES", 10_000)  # every list: then inverted lists are exact as well
    description = build_ann(root, SPEC)
    assert (description["kind"], description["vectors"]) == ("flat" if flat_limit == 1000 else "ivf-flat", 297)
    vectors = embeddings(root)
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    oracle = faiss.IndexFlatIP(SPEC.embed_dim)
    oracle.add(vectors[kept])
    index = AnnIndex(root)
    for row in kept[::25]:
        rows, scores = index.nearest(vectors[row], 7)
        expected_scores, expected = oracle.search(vectors[row][None], 7)
        assert rows.tolist() == kept[expected[0]].tolist()
        np.testing.assert_allclose(scores, expected_scores[0], atol=1e-6)
        assert rows[0] == row
    assert len(index.nearest(vectors[1], 10_000)[0]) == 297


def test_same_embeddings_give_the_same_bytes(root):
    assert build_ann(root, SPEC) == build_ann(root, SPEC)


def test_query_of_another_width_is_refused(root):
    build_ann(root, SPEC)
    with pytest.raises(ModelError, match="has 5 dimensions, the embeddings of the index 12"):
        AnnIndex(root).nearest(np.ones(5, np.float32), 1)


def test_damaged_index_is_one_clear_error(root, tmp_path):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "index.faiss").write_bytes(b"nonsense")
    with pytest.raises(CorruptIndexError, match="edje-index verify"):
        AnnIndex(tmp_path)
