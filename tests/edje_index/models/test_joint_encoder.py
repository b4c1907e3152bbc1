"""The joint encoder on its own: pools, data types, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.devices import to_bf16_array


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(seed))


def test_one_caption_for_a_whole_pool(tiny_model: ModelBundle) -> None:
    pool = blocks(tiny_model.joint.scorer().batch + 7)
    scores = tiny_model.joint.score("a red dog", pool)
    assert scores.shape == (len(pool),)
    assert torch.equal(scores, tiny_model.joint.score(["a red dog"] * len(pool), pool))
    assert torch.equal(scores, tiny_model.joint.score(["a red dog"], pool))
    alone = torch.cat([tiny_model.joint.score("a red dog", pool[i : i + 1]) for i in range(len(pool))])
    torch.testing.assert_close(scores, alone, atol=1e-6, rtol=0)
    assert scores.std() > 0


def test_words_beyond_the_limit_do_not_matter(tiny_model: ModelBundle) -> None:
    pool = blocks(1)
    assert torch.equal(tiny_model.joint.score("a " * 61, pool), tiny_model.joint.score("a " * 300, pool))
    assert not torch.equal(tiny_model.joint.score("a " * 60, pool), tiny_model.joint.score("a " * 61, pool))


def test_image_placeholder_in_a_caption_is_only_a_word(tiny_model: ModelBundle) -> None:
    inputs = tiny_model.joint.tokenizer.inputs(["a <image> dog"], 4)
    assert int((inputs.input_ids == tiny_model.joint.tokenizer.image_token_id).sum()) == 4
    assert torch.isfinite(tiny_model.joint.score("<image>" * 9, blocks(2))).all()


def test_takes_stored_blocks_as_they_are(tiny_model: ModelBundle) -> None:
    stored = to_bf16_array(blocks(3))
    assert stored.dtype == ml_dtypes.bfloat16
    stored.flags.writeable = False
    expected = tiny_model.joint.score("a dog", torch.from_numpy(stored.astype(np.float32)))
    assert torch.equal(tiny_model.joint.score("a dog", stored), expected)


def test_bfloat16_rounds_the_language_model_and_not_the_head(
    tiny_model: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint, pool, captions = tiny_model.joint, blocks(40), ["a red dog on the sand"]
    exact = joint.score(captions, pool)
    monkeypatch.setattr(joint, "compute_dtype", torch.bfloat16)
    rounded = joint.score(captions, pool)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert len(rounded.unique()) > 30, "few are equal for having few bits"
    torch.testing.assert_close(rounded, exact, atol=1e-3, rtol=0)


def test_refuses_what_does_not_fit(tiny_model: ModelBundle) -> None:
    with pytest.raises(ModelError, match="2 captions for 3 blocks"):
        tiny_model.joint.score(["a", "b"], blocks(3))
    with pytest.raises(ModelError, match=r"\[b, m, 16\], got \[3, 4, 8\]"):
        tiny_model.joint.score("a", blocks(3)[:, :, :8])
