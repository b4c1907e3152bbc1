"""Each part of a bundle's score alone, against the definition of the part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.errors import ModelError
from edje_index.scoring.parts import (
    Scorer,
    content_token_mask,
    late_interaction,
)
from edje_index.scoring.weights import MAX_WEIGHT, PART_NAMES, ScoreWeights
from edje_index.training.step import alignment_scores
from tests.edje_index.scoring.bundles import bundle_with_all_parts

CAPTIONS = ["a dog", "two cats and a house", "a dog", "of the"]


@pytest.fixture
def bundle(tiny_bundle):
    return bundle_with_all_parts(tiny_bundle)


@pytest.fixture
def scorer(bundle):
    return bundle.scorer


@pytest.fixture
def tokens(bundle):
    return torch.randn(
        4, *bundle.block_shape, generator=torch.Generator().manual_seed(0)
    ).bfloat16()


def part(scorer: Scorer, name: str, tokens: torch.Tensor) -> np.ndarray:
    return scorer.parts([name], CAPTIONS, scorer.images(tokens))[name]


def test_the_logit_is_the_joint_encoder_alone(bundle, scorer, tokens):
    logits = part(scorer, "logit", tokens)
    np.testing.assert_array_equal(logits, bundle.joint.score(CAPTIONS, tokens).numpy())
    inputs = bundle.joint.tokenizer.inputs(CAPTIONS, bundle.block_shape[0])
    with torch.inference_mode():
        np.testing.assert_allclose(
            logits, bundle.joint(inputs, tokens).numpy(), atol=1e-6
        )


def test_a_score_is_always_a_number(bundle, scorer, tokens):
    with torch.no_grad():
        bundle.joint.classification_head[1].weight.fill_(3e38)
    with pytest.raises(
        ModelError, match=r"computes a logit that is NaN, or beyond 1e\+07"
    ):
        part(bundle.scorer, "logit", tokens)
    largest = ScoreWeights(**dict.fromkeys(PART_NAMES, MAX_WEIGHT))
    assert np.isfinite(
        largest.sum(dict.fromkeys(PART_NAMES, np.float32([1e7, -1e7])))
    ).all()


def test_late_interaction_reads_the_content_words_of_the_joint_encoder(
    bundle, scorer, tokens
):
    tokenizer = bundle.joint.tokenizer
    content = content_token_mask(tokenizer)
    token_id = tokenizer.tokenizer.token_to_id
    assert not content[
        [
            token_id(word)
            for word in ("[CLS]", "[MASK]", "<image>", ".", "the", "a", "of")
        ]
    ].any()
    assert content[[token_id(word) for word in ("b", "##z", "7")]].all()
    expected = late_interaction(
        tokenizer.caption_ids(CAPTIONS),
        tokens,
        scorer.joint.word_vectors,
        content,
    )
    scores = part(scorer, "late", tokens)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert (np.abs(scores[:3]) > 0).all()
    assert scores[3] == 0, "a caption of stop words"


def test_late_interaction_scores_pairs_as_the_alignment_phase_does():
    """The training loss, which has an oracle of its own, is the reference."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(30, 8, generator=generator)
    tokens = torch.randn(4, 5, 8, generator=generator)
    captions = [[1, 2, 2, 29], [7], [8, 9, 3], []]
    content = np.arange(30) != 3
    mean = words.mean(dim=0)
    shares = torch.zeros(30, 4)
    for at, caption in enumerate(captions):
        kept = [word for word in caption if content[word]]
        for word in kept:
            shares[word, at] += 1 / len(kept)
    expected = alignment_scores(tokens - mean, words - mean, shares).diagonal()
    torch.testing.assert_close(
        late_interaction(captions, tokens, words, content), expected
    )
    assert late_interaction([[3], []], tokens[:2], words, content).tolist() == [
        0.0,
        0.0,
    ]


def test_pooled_similarity_is_the_cosine_of_two_linear_maps(bundle, scorer, tokens):
    """Against NumPy in float64, caption by caption."""
    joint = bundle.joint
    maps = {
        name: value.double().numpy()
        for name, value in bundle.pooled.state_dict().items()
    }
    expected = []
    for caption, block in zip(CAPTIONS, tokens.double().numpy(), strict=True):
        seen = (
            np.concatenate([block.mean(0), block.std(0), block.max(0)]) @ maps["image"]
            + maps["image_offset"]
        )
        inputs = joint.tokenizer.inputs([caption], 0)
        hidden = (
            joint.hidden_states(inputs, torch.empty(0, 0, joint.width))[0]
            .detach()
            .double()
            .numpy()
            .mean(0)
        )
        words = set(joint.tokenizer.caption_ids([caption])[0])
        bag = np.array(
            [
                w * (n in words)
                for n, w in zip(maps["word_numbers"], maps["word_weights"], strict=True)
            ]
        )
        bag /= np.linalg.norm(bag) or 1
        said = hidden @ maps["sentence"] + bag @ maps["words"] + maps["caption_offset"]
        expected.append(seen @ said / np.linalg.norm(seen) / np.linalg.norm(said))
    np.testing.assert_allclose(part(scorer, "pooled", tokens), expected, atol=2e-5)
