"""Which pairs a batch holds, and the rows that are made of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.batches import (
    hard_negatives,
    mask_captions,
)
from storage_formats.errors import UsageError
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle):
    return ModelBundle.load(tiny_bundle).joint.tokenizer


def test_masks_leave_special_tokens_out(tokenizer):
    rng = np.random.default_rng(0)
    unknown = tokenizer.special_id("unk_token")
    texts = [rng.integers(50, 400, rng.integers(1, 20)).tolist() for _ in range(2000)]
    for text in texts[:100]:
        text[0] = unknown
    masked = mask_captions(texts, 0.5, tokenizer, rng)
    assert [*map(len, masked)] == [*map(len, texts)]
    before = np.concatenate(texts)
    after = np.concatenate(masked)
    changed = before != after
    assert (after[changed] == tokenizer.special_id("mask_token")).all()
    assert unknown not in before[changed]
    assert changed.sum() / (len(before) - 100) == pytest.approx(0.5, abs=0.02)


def rows_of(batch, source, patches, *, teacher=False):
    """(row in the index, caption tokens) of every row of every chunk of a batch, told
    by its tensors alone.

    `patches` are those of the images of all workers.
    """
    store = TokenStore.open(source.data.index.root)
    blocks = {store.fetch([row]).tobytes(): row for row in range(len(store))}
    patches = patches.view(torch.int16).numpy()
    for chunk in batch.chunks:
        inputs = chunk.teacher if teacher else chunk.rows
        images = [blocks[patches[at].tobytes()] for at in chunk.images]
        texts = texts_of(inputs, source.tokenizer)
        yield chunk, images[: len(texts)], texts


def texts_of(inputs, tokenizer):
    used = inputs.attention_mask.sum(dim=1)
    # no row is padded for nothing
    assert used.max() == inputs.input_ids.shape[1]
    assert (inputs.input_ids[:, 0] == tokenizer.special_id("cls_token")).all()
    sep = tokenizer.special_id("sep_token")
    return [tuple(ids[1 : ids.index(sep)]) for ids in inputs.input_ids.tolist()]


@pytest.mark.parametrize("chunk_pairs", [64, 3])
def test_a_batch_holds_positives_negatives_and_masked_rows_in_their_order(
    case, chunk_pairs
):
    source = replace(case.source(run__chunk_pairs=chunk_pairs), teacher_tokens=7)
    batch = source.joint(5)
    k = 2
    data = source.data
    own_images, own_captions = source.pairs(5)
    own_texts = [tuple(data.caption(caption)) for caption in own_captions]
    anchors = []
    lengths = []
    taught = rows_of(batch, source, batch.patches, teacher=True)
    for chunk, images, texts in rows_of(batch, source, batch.patches):
        b = chunk.pairs
        scored = b * (1 + 2 * k)
        assert len(images) == len(texts) == scored + b
        anchors += zip(images[:b], texts[:b], strict=True)
        lengths += map(len, texts[:b])
        assert (chunk, images[:scored], texts[:scored]) == next(taught)
        for anchor in range(b):
            for negative in range(b + k * anchor, b + k * anchor + k):
                assert texts[negative] == texts[anchor]
                assert images[negative] != images[anchor]
                assert images[negative] in data.rows[own_images]
            for negative in range(
                b * (1 + k) + k * anchor, b * (1 + k) + k * anchor + k
            ):
                assert images[negative] == images[anchor]
                assert texts[negative] != texts[anchor]
                assert texts[negative] in own_texts
        assert images[scored:] == images[:b]
        mask = source.tokenizer.special_id("mask_token")
        ids = chunk.rows.input_ids.clone()
        assert (ids[scored:][chunk.masked] == mask).all()
        ids[scored:][chunk.masked] = ids[:b][chunk.masked]
        assert torch.equal(ids[scored:], ids[:b])
        inputs, shown = chunk.recovery
        assert texts_of(inputs, source.tokenizer) == texts[:b]
        for embedding, text in zip(shown, texts, strict=False):
            assert any(
                np.array_equal(embedding, data.records["embedding"][caption])
                for caption in own_captions
                if tuple(data.caption(caption)) == text
            )
    assert sorted(anchors) == sorted(zip(data.rows[own_images], own_texts, strict=True))
    assert lengths == sorted(lengths)


def test_ranks_share_a_batch_and_mine_over_all_of_it(case):
    whole = case.source()
    batch = whole.joint(3)
    pairs = 8 * 5
    [(_, images, texts)] = rows_of(batch, whole, batch.patches)
    expected = sorted(zip(images[:pairs], texts[:pairs], strict=True))
    parts = [case.source(rank, 2) for rank in range(2)]
    batches = [part.joint(3) for part in parts]
    patches = torch.cat([batch.patches for batch in batches])
    rows = []
    beyond = set()
    for part, batch in zip(parts, batches, strict=True):
        [(chunk, images, texts)] = rows_of(batch, part, patches)
        assert chunk.pairs == 4
        rows += zip(images[: pairs // 2], texts[: pairs // 2], strict=True)
        beyond |= set(images[4:12]) - set(images[:4])
    assert sorted(rows) == expected
    # some negatives come from the other rank
    assert beyond


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (1, 3)])
def test_negatives_are_the_top_k_of_the_published_sampling(case, seed, count):
    """In float64: rank the batch by softmax of the similarities without the anchor's
    own pairs.
    """
    source = case.source(negatives__count=count, loop__seed=seed, loop__batch_size=12)
    # each photo has two images
    data = replace(source.data, photos=source.data.photos // 2)
    source = replace(source, data=data)
    images, captions = source.pairs(seed)
    texts = data.records["embedding"][captions].astype(np.float64)
    photos = read_embeddings(data.index, data.rows[images]).astype(np.float64)
    keys = data.records["key"][captions]
    drawn = source.negatives(images, captions)
    for chosen, similarities in zip(
        drawn, (texts @ photos.T, photos @ texts.T), strict=True
    ):
        shares = np.exp(similarities)
        shares /= shares.sum(axis=1, keepdims=True)
        for anchor, row in enumerate(shares):
            allowed = [
                (-share, other)
                for other, share in enumerate(row)
                if data.photos[images[other]] != data.photos[images[anchor]]
                and keys[other] != keys[anchor]
            ]
            best = [other for _, other in sorted(allowed)[:count]]
            assert chosen[anchor].tolist() == best


def test_the_first_of_equal_candidates_comes_first_and_few_are_repeated():
    similar = np.array([[5, 7, 5, 9, 7, 1]])
    masked = np.array([[False, False, False, True, False, True]])
    order = [1, 4, 0, 2]
    for count in range(1, 7):
        (chosen,) = hard_negatives(similar, masked, count).tolist()
        assert chosen == (order + order)[:count]


def test_a_row_without_candidates_is_refused():
    with pytest.raises(UsageError, match=r"new run folder with a higher loop"):
        hard_negatives(np.zeros((2, 2)), np.ones((2, 2), dtype=bool), 1)
