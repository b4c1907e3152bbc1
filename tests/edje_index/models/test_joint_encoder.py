"""The joint encoder on its own: pools, data types, refusals."""

from __future__ import annotations

import pytest
import torch

from edje_index.errors import ModelError


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(seed))


def test_one_caption_for_a_whole_pool(tiny_model):
    pool = blocks(tiny_model.joint.scorer().batch + 7)
    scores = tiny_model.joint.score("a red dog", pool)
    assert scores.shape == (len(pool),)
    assert torch.equal(scores, tiny_model.joint.score(["a red dog"] * len(pool), pool))
    assert torch.equal(scores, tiny_model.joint.score(["a red dog"], pool))
    alone = torch.cat(
        [tiny_model.joint.score("a red dog", pool[i : i + 1]) for i in range(len(pool))]
    )
    torch.testing.assert_close(scores, alone, atol=1e-6, rtol=0)
    assert scores.std() > 0


def test_captions_of_different_lengths_equal_the_model_with_padding(
    tiny_model,
):
    """The scorer groups captions by length, and needs no mask."""
    joint = tiny_model.joint
    captions = ["dog " * (1 + i * 7 % 5) + str(i) for i in range(70)]
    pool = blocks(len(captions))
    with torch.inference_mode():
        expected = joint(joint.tokenizer.inputs(captions, 4), pool)
    torch.testing.assert_close(joint.score(captions, pool), expected, atol=1e-5, rtol=0)
    assert joint.score([], pool[:0]).shape == joint.score("a", pool[:0]).shape == (0,)


def test_a_batch_of_captions_of_different_lengths_needs_padding_and_a_mask(
    tiny_model,
):
    """On a GPU, captions of different lengths are in one batch."""
    scorer = tiny_model.joint.scorer()
    captions = ["dog " * (1 + i // 6) + "a" for i in range(24)]
    pool = blocks(len(captions))
    ids = scorer.tokenizer.caption_ids(captions)
    rows = scorer.tokenizer.inputs_of_ids(ids, 0).input_ids
    lengths = torch.tensor([len(caption) for caption in ids])
    torch.testing.assert_close(
        scorer.logits(rows, pool, lengths),
        scorer.score(captions, pool),
        atol=1e-5,
        rtol=0,
    )


def test_image_placeholder_in_a_caption_is_only_a_word(tiny_model):
    inputs = tiny_model.joint.tokenizer.inputs(["a <image> dog"], 4)
    assert (
        int((inputs.input_ids == tiny_model.joint.tokenizer.image_token_id).sum()) == 4
    )
    assert torch.isfinite(tiny_model.joint.score("<image>" * 9, blocks(2))).all()


def test_bfloat16_rounds_the_language_model_and_not_the_head(tiny_model, monkeypatch):
    joint = tiny_model.joint
    pool = blocks(40)
    captions = ["a red dog on the sand"]
    exact = joint.score(captions, pool)
    monkeypatch.setattr(joint, "compute_dtype", torch.bfloat16)
    rounded = joint.score(captions, pool)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert len(rounded.unique()) > 30, "few are equal for having few bits"
    torch.testing.assert_close(rounded, exact, atol=1e-3, rtol=0)


def test_refuses_what_does_not_fit(tiny_model):
    with pytest.raises(ModelError, match="2 captions for 3 blocks"):
        tiny_model.joint.score(["a", "b"], blocks(3))
    with pytest.raises(ModelError, match=r"\[b, m, 16\], got \[3, 4, 8\]"):
        tiny_model.joint.score("a", blocks(3)[:, :, :8])
