"""Which pairs a batch holds, and the rows that are made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.batches import (
    Sampler,
    mask_captions,
    masked_targets,
    text_rows,
)
from storage_formats.token_store import TokenStore
from tests.edje_index.training.conftest import IMAGES


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle):
    return ModelBundle.load(tiny_bundle).joint.tokenizer


def test_text_rows_are_cls_caption_sep_and_masks_leave_special_tokens_out(
    tokenizer,
):
    rng = np.random.default_rng(0)
    cls = tokenizer.special_id("cls_token")
    sep = tokenizer.special_id("sep_token")
    unknown = tokenizer.special_id("unk_token")
    texts = [rng.integers(50, 400, rng.integers(1, 20)).tolist() for _ in range(2000)]
    for text in texts[:100]:
        text[0] = unknown
    masked, is_masked = mask_captions(texts, 0.5, tokenizer, rng)
    rows = text_rows(masked, tokenizer)
    plain = text_rows(texts, tokenizer)
    for ids, mask, caption in zip(
        plain.input_ids, plain.attention_mask, texts, strict=True
    ):
        assert ids[mask.bool()].tolist() == [cls, *caption, sep]
    positions, targets = masked_targets(texts, is_masked, rows.input_ids.shape[1])
    assert (
        rows.input_ids.flatten()[positions] == tokenizer.special_id("mask_token")
    ).all()
    assert torch.equal(plain.input_ids.flatten()[positions], targets)
    assert torch.equal(
        (rows.input_ids != plain.input_ids).flatten().nonzero()[:, 0], positions
    )
    assert unknown not in targets.tolist()
    assert len(positions) / (sum(map(len, texts)) - 100) == pytest.approx(0.5, abs=0.02)


def rows_of(batch, source, patches):
    """(row in the index, caption tokens) of every row of a batch, told by its tensors
    alone.

    `patches` are those of the images of all workers.
    """
    store = TokenStore.open(source.features.index.root)
    blocks = {store.fetch([row]).tobytes(): row for row in range(len(store))}
    patches = patches.view(torch.int16).numpy()
    images = [blocks[patches[at].tobytes()] for at in batch.image]
    sep = source.tokenizer.special_id("sep_token")
    texts = []
    for ids in batch.inputs.input_ids.tolist():
        texts.append(tuple(ids[1 : ids.index(sep)]))
    return images, texts


def test_a_batch_holds_positives_negatives_and_masked_rows_in_their_order(case):
    source = case.source()
    batch = source.joint(5)
    b = 8
    k = 2
    images, texts = rows_of(batch, source, batch.patches)
    assert len(images) == len(texts) == b * (1 + 2 * k) + b
    data = source.data
    own_images, own_captions = Sampler(data, b, 0).pairs(5)
    assert images[:b] == data.rows[own_images].tolist()
    assert texts[:b] == [tuple(data.caption(at)) for at in own_captions]
    caption_of = {
        tuple(data.caption(at)): image
        for at, image in zip(own_captions, own_images, strict=True)
    }
    for anchor in range(b):
        for negative in range(b + k * anchor, b + k * anchor + k):
            assert texts[negative] == texts[anchor]
            assert images[negative] != images[anchor]
            assert images[negative] in images[:b]
        for negative in range(b * (1 + k) + k * anchor, b * (1 + k) + k * anchor + k):
            assert images[negative] == images[anchor]
            assert texts[negative] != texts[anchor]
            assert texts[negative] in caption_of
    assert images[-b:] == images[:b]
    positions, targets = batch.masked
    width = batch.inputs.input_ids.shape[1]
    flat = batch.inputs.input_ids[-b:].flatten()
    assert (flat[positions] == source.tokenizer.special_id("mask_token")).all()
    restored = flat.clone()
    restored[positions] = targets
    assert torch.equal(restored.view(b, width), batch.inputs.input_ids[:b])


def test_ranks_share_a_batch_and_mine_over_all_of_it(case):
    whole = case.source()
    parts = [case.source(rank, 2) for rank in range(2)]
    images, texts = rows_of(whole.joint(3), whole, whole.joint(3).patches)
    patches = torch.cat([part.joint(3).patches for part in parts])
    b = 8
    k = 2
    for rank, part in enumerate(parts):
        batch = part.joint(3)
        found_images, found_texts = rows_of(batch, part, patches)
        local = range(rank * 4, rank * 4 + 4)
        expected = [
            *local,
            *(b + k * at + j for at in local for j in range(k)),
            *(b * (1 + k) + k * at + j for at in local for j in range(k)),
        ]
        pairs = 4 * (1 + 2 * k)
        assert found_images[:pairs] == [images[at] for at in expected]
        assert found_texts[:pairs] == [texts[at] for at in expected]
    beyond = set(found_images) - set(images[4:8])
    assert beyond, "no negative came from the other rank"


def test_a_batch_shows_photos_and_views_at_random(case):
    """Photos are rows 2 to 25; rows 0 and 1 stand for the views; some images have
    one view or none.
    """
    source = case.source()
    rows = np.full((IMAGES, 2), -1)
    rows[:12] = [0, 1]
    rows[12:18, 0] = 0
    viewing = replace(source, views=(source.features, rows))
    store = TokenStore.open(source.features.index.root)
    blocks = {store.fetch([row]).tobytes(): row for row in range(len(store))}
    shown: dict[int, set[int]] = {image: set() for image in range(IMAGES)}
    content = np.ones(1000, dtype=bool)
    for number in range(30):
        for make, again in (
            (viewing.joint, viewing.joint),
            (viewing.alignment(content), viewing.alignment(content)),
        ):
            batch = make(number)
            assert torch.equal(batch.patches, again(number).patches)
            if hasattr(batch, "image"):
                images = Sampler(source.data, 8, 0).pairs(number)[0]
            else:
                images = Sampler(source.data, IMAGES, 0).sets(number, 1)[0]
            for image, patches in zip(
                images.tolist(), batch.patches.view(torch.int16).numpy(), strict=True
            ):
                shown[image].add(blocks[patches.tobytes()])
    for image, shown_rows in shown.items():
        assert shown_rows == {image + 2, *rows[image][rows[image] >= 0]}
