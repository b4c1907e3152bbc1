"""Which pairs a batch holds, and the rows that are made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.batches import (
    mask_captions,
    masked_targets,
)
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
    rows = tokenizer.inputs_of_ids(masked, None)
    plain = tokenizer.inputs_of_ids(texts, None)
    for ids, mask, caption in zip(
        plain.input_ids, plain.attention_mask, texts, strict=True
    ):
        assert ids[mask.bool()].tolist() == [cls, *caption, sep]
    starts = np.arange(len(texts)) * rows.input_ids.shape[1]
    positions, targets = masked_targets(texts, masked, starts)
    assert (
        rows.input_ids.flatten()[positions] == tokenizer.special_id("mask_token")
    ).all()
    assert torch.equal(plain.input_ids.flatten()[positions], targets)
    assert torch.equal(
        (rows.input_ids != plain.input_ids).flatten().nonzero()[:, 0], positions
    )
    assert unknown not in targets.tolist()
    assert len(positions) / (sum(map(len, texts)) - 100) == pytest.approx(0.5, abs=0.02)


def rows_of(batch, source, patches, *, teacher=False):
    """(row in the index, caption tokens) of every row of every chunk of a batch, told
    by its tensors alone. A row without image tokens has the row -1.

    `patches` are those of the images of all workers.
    """
    store = TokenStore.open(source.data.index.root)
    blocks = {store.fetch([row]).tobytes(): row for row in range(len(store))}
    patches = patches.view(torch.int16).numpy()
    sep = source.tokenizer.special_id("sep_token")
    for chunk in batch.chunks:
        rows = chunk.teacher if teacher else chunk.rows
        images = []
        texts = []
        for bucket, shown in rows.buckets:
            used = bucket.attention_mask.sum(dim=1)
            assert used.max() == bucket.input_ids.shape[1], "it is padded for nothing"
            images += [blocks[patches[at].tobytes()] for at in shown] or [-1] * len(
                bucket.input_ids
            )
            for ids in bucket.input_ids.tolist():
                texts.append(tuple(ids[1 : ids.index(sep)]))
        flat = torch.cat([bucket.input_ids.flatten() for bucket, _ in rows.buckets])
        assert (flat[rows.starts] == source.tokenizer.special_id("cls_token")).all()
        order = rows.starts.argsort().argsort()
        yield chunk, [images[at] for at in order], [texts[at] for at in order]


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
        assert len(images) == len(texts) == scored + 2 * b
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
        assert images[scored:] == [*images[:b], *[-1] * b]
        assert texts[-b:] == texts[:b]
        flat = torch.cat(
            [bucket.input_ids.flatten() for bucket, _ in chunk.rows.buckets]
        )
        positions, targets = chunk.masked
        assert (flat[positions] == source.tokenizer.special_id("mask_token")).all()
        flat[positions] = targets
        for start, text in zip(
            chunk.rows.starts[scored : scored + b].tolist(), texts[:b], strict=True
        ):
            assert tuple(flat[start + 1 : start + 1 + len(text)].tolist()) == text
        embeddings = [data.records["embedding"][own_captions[at]] for at in range(8)]
        for embedding, text in zip(chunk.embeddings, texts, strict=False):
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
