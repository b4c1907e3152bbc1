"""Which pairs a batch holds, and the rows that are made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.batches import mask_captions
from storage_formats.token_store import TokenStore


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle):
    return ModelBundle.load(tiny_bundle).joint.tokenizer


def test_rows_without_images_are_cls_caption_sep_and_masks_leave_special_tokens_out(
    tokenizer,
):
    rng = np.random.default_rng(0)
    cls = tokenizer.special_id("cls_token")
    sep = tokenizer.special_id("sep_token")
    unknown = tokenizer.special_id("unk_token")
    texts = [rng.integers(50, 400, rng.integers(1, 20)).tolist() for _ in range(2000)]
    for text in texts[:100]:
        text[0] = unknown
    masked = mask_captions(texts, 0.5, tokenizer, rng)
    assert [*map(len, masked)] == [*map(len, texts)]
    plain = tokenizer.inputs_of_ids(texts, None)
    for ids, mask, caption in zip(
        plain.input_ids, plain.attention_mask, texts, strict=True
    ):
        assert ids[mask.bool()].tolist() == [cls, *caption, sep]
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
    assert used.max() == inputs.input_ids.shape[1], "it is padded for nothing"
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
    caption_of = {
        tuple(data.caption(caption)): data.rows[image]
        for caption, image in zip(own_captions, own_images, strict=True)
    }
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
                assert texts[negative] in caption_of
        assert images[scored:] == images[:b]
        mask = source.tokenizer.special_id("mask_token")
        ids = chunk.rows.input_ids.clone()
        assert (ids[scored:][chunk.masked] == mask).all()
        ids[scored:][chunk.masked] = ids[:b][chunk.masked]
        assert torch.equal(ids[scored:], ids[:b])
        inputs, shown = chunk.recovery
        assert texts_of(inputs, source.tokenizer) == texts[:b]
        embeddings = [data.records["embedding"][own_captions[at]] for at in range(8)]
        for embedding, text in zip(shown, texts, strict=False):
            captions = [tuple(data.caption(at)) for at in own_captions]
            assert any(
                np.array_equal(embedding, other)
                for other, caption in zip(embeddings, captions, strict=True)
                if caption == text
            )
    assert sorted(anchors) == sorted(
        (data.rows[image], tuple(data.caption(caption)))
        for caption, image in zip(own_captions, own_images, strict=True)
    )
    assert lengths == sorted(lengths)


def test_chunks_differ_in_nothing_but_their_size(case):
    """The masked tokens are drawn before the pairs are divided."""
    drawn = []
    for chunk_pairs in (64, 3):
        source = case.source(run__chunk_pairs=chunk_pairs)
        batch = source.joint(1)
        rows = [
            (images[at], texts[at])
            for _, images, texts in rows_of(batch, source, batch.patches)
            for at in range(len(images))
        ]
        drawn.append(sorted(rows))
    assert drawn[0] == drawn[1]


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
    assert beyond, "no negative came from the other rank"
