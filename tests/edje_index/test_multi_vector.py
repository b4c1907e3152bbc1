"""Multi-vector models: items of unequal numbers of vectors in a store of equal
blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index import IndexWriter, LateInteractionSearch, add_ann
from storage_formats import UsageError
from tests.conftest import write_arrays

slow = pytest.mark.slow


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


def test_a_filter_limits_the_candidates(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((30, 4, 8), dtype=np.float32)
    embeddings = rng.standard_normal((30, 8), dtype=np.float32)
    write_arrays(
        tmp_path / "i", blocks, embeddings, {"width": [row % 3 for row in range(30)]}
    )
    add_ann(tmp_path / "i")
    search = LateInteractionSearch.open(tmp_path / "i")
    for candidates in ({"embedding": embeddings[4]}, {"row_ids": range(30)}):
        hits = search.search(blocks[4], 30, where="width = 1", **candidates)
        assert sorted(hit.row_id for hit in hits) == list(range(1, 30, 3))
        assert hits[0].row_id == 4
    with pytest.raises(UsageError, match="there is no column colour"):
        search.search(blocks[4], where="colour = 1", row_ids=[1])


@slow
def test_a_multi_vector_encoder_of_sentence_transformers(tmp_path):
    pytest.importorskip("sentence_transformers", minversion="6")
    from sentence_transformers.multi_vector_encoder.modules import (
        HierarchicalTokenPooling,
    )

    texts = [
        "a dog runs",
        "two dogs play in the deep snow of a park while a man looks on",
        "a canoe",
        "red",
        "water",
    ]
    model = tiny_multi_vector_encoder(tmp_path, texts)
    documents = model.encode_document(texts)
    (query,) = model.encode_query(["a dog in the snow"])
    m = 6
    pooled = [
        HierarchicalTokenPooling(max(1, (len(each) - 1) / (m - 1))).pool_one(each.cpu())
        for each in documents
    ]
    means = np.stack([each.mean(dim=0) for each in pooled])
    write_arrays(tmp_path / "i", pooled, means, texts, block_shape=(m, query.shape[1]))
    search = LateInteractionSearch.open(tmp_path / "i")
    hits = search.search(query.cpu(), k=5, row_ids=search.store.row_ids())
    stored = [each.bfloat16().float() for each in pooled]
    expected = model.similarity([query.cpu()], stored)[0].tolist()
    assert min(map(len, pooled)) < m
    assert {hit.row_id: hit.score for hit in hits} == pytest.approx(
        dict(enumerate(expected)), abs=1e-4
    )


def tiny_multi_vector_encoder(folder, texts):
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    words = sorted({word for text in texts for word in text.split()})
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    )
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(vocab_size=len(words) + 5, **sizes)).save_pretrained(
        folder / "bert"
    )
    return MultiVectorEncoder(
        modules=[Transformer(str(folder / "bert")), MultiVectorMask(), Normalize()]
    )
