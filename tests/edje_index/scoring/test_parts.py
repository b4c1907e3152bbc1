"""Each part of a bundle's score alone, against the definition of the part."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.scoring.parts import (
    Pairs,
    ScoreModels,
    content_token_mask,
    late_interaction,
    word_bags,
)
from edje_index.scoring.weights import PART_NAMES, DirectionWeights, ScoreWeights, check_parts, parse_score
from edje_index.training.step import alignment_scores
from storage_formats import UsageError
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts, unit

CAPTIONS = ["a dog", "two cats and a house", "a dog", "of the"]


@pytest.fixture
def bundle(tiny_bundle) -> ModelBundle:
    return bundle_with_all_parts(tiny_bundle)


@pytest.fixture
def models(bundle) -> ScoreModels:
    return bundle.score_models


@pytest.fixture
def pairs(bundle) -> Pairs:
    tokens = torch.randn(4, *bundle.block_shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return Pairs(CAPTIONS, tokens, np.linspace(-1, 1, 4, dtype=np.float32), unit(4, 24, 8).numpy())


def part(models: ScoreModels, name: str, pairs: Pairs, direction: str = "t2i") -> np.ndarray:
    return models.part(name, pairs, direction, WEIGHTS.of(direction))


def test_the_logit_is_the_joint_encoder_alone(bundle, models, pairs):
    logits = part(models, "logit", pairs)
    np.testing.assert_array_equal(logits, bundle.joint.score(pairs.captions, pairs.tokens).numpy())
    inputs = bundle.joint.tokenizer.inputs(CAPTIONS, bundle.block_shape[0])
    with torch.inference_mode():
        np.testing.assert_allclose(logits, bundle.joint(inputs, pairs.tokens).numpy(), atol=1e-6)


def test_late_interaction_reads_the_content_words_of_the_joint_encoder(bundle, models, pairs):
    tokenizer = bundle.joint.tokenizer
    content, token_id = content_token_mask(tokenizer), tokenizer.tokenizer.token_to_id
    assert not content[[token_id(word) for word in ("[CLS]", "[MASK]", "<image>", ".", "the", "a", "of")]].any()
    assert content[[token_id(word) for word in ("b", "##z", "7")]].all()
    expected = late_interaction(tokenizer.caption_ids(CAPTIONS), pairs.tokens, models.joint.word_vectors, content)
    scores = part(models, "late", pairs)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert (np.abs(scores[:3]) > 0).all()
    assert scores[3] == 0, "a caption of stop words"


def test_late_interaction_scores_pairs_as_the_alignment_phase_does():
    """The training loss, which has an oracle of its own, is the reference."""
    generator = torch.Generator().manual_seed(0)
    words, tokens = torch.randn(30, 8, generator=generator), torch.randn(4, 5, 8, generator=generator)
    captions, content = [[1, 2, 2, 29], [7], [8, 9, 3], []], np.arange(30) != 3
    mean, shares = words.mean(dim=0), torch.zeros(30, 4)
    for at, caption in enumerate(captions):
        kept = [word for word in caption if content[word]]
        for word in kept:
            shares[word, at] += 1 / len(kept)
    expected = alignment_scores(tokens - mean, words - mean, shares).diagonal()
    torch.testing.assert_close(late_interaction(captions, tokens, words, content), expected)
    assert late_interaction([[3], []], tokens[:2], words, content).tolist() == [0.0, 0.0]


def test_pooled_similarity_is_the_cosine_of_two_linear_maps(bundle, models, pairs):
    """Against NumPy in float64, caption by caption."""
    joint = bundle.joint
    maps = {name: value.double().numpy() for name, value in bundle.pooled.state_dict().items()}
    expected = []
    for caption, block in zip(CAPTIONS, pairs.tokens.double().numpy(), strict=True):
        seen = np.concatenate([block.mean(0), block.std(0), block.max(0)]) @ maps["image"] + maps["image_offset"]
        inputs = joint.tokenizer.inputs([caption], 0)
        hidden = joint.hidden_states(inputs, torch.empty(0, 0, joint.width))[0].detach().double().numpy().mean(0)
        words = set(joint.tokenizer.caption_ids([caption])[0])
        bag = np.array([w * (n in words) for n, w in zip(maps["word_numbers"], maps["word_weights"], strict=True)])
        bag /= np.linalg.norm(bag) or 1
        said = hidden @ maps["sentence"] + bag @ maps["words"] + maps["caption_offset"]
        expected.append(seen @ said / np.linalg.norm(seen) / np.linalg.norm(said))
    np.testing.assert_allclose(part(models, "pooled", pairs), expected, atol=2e-5)


@given(
    captions=st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=5),
    numbers=st.sets(st.integers(0, 30), max_size=10).map(sorted),
)
def test_bags_hold_the_counted_words_once(captions, numbers):
    weights = [1.0 + number for number in numbers]
    bags = word_bags(captions, torch.tensor(numbers, dtype=torch.int64), torch.tensor(weights))
    for bag, caption in zip(bags, captions, strict=True):
        expected = [weight if number in caption else 0.0 for number, weight in zip(numbers, weights, strict=True)]
        length = math.sqrt(sum(value * value for value in expected)) or 1.0
        assert bag.tolist() == pytest.approx([value / length for value in expected], abs=1e-6)


def test_scores_do_not_depend_on_the_batch(bundle, models):
    tokens = torch.randn(300, *bundle.block_shape).bfloat16()
    pairs = Pairs(["a dog"] * 300, tokens, np.linspace(0, 1, 300, dtype=np.float32), unit(300, 24).numpy())
    for name in PART_NAMES:
        whole = part(models, name, pairs)
        for row in (0, 150, 299):
            alone = pairs.at(np.arange(300) == row)
            np.testing.assert_allclose(part(models, name, alone)[0], whole[row], atol=1e-4)


def test_a_bundle_without_parts_scores_by_the_logit(tiny_model):
    assert tiny_model.score == DirectionWeights(ScoreWeights(), ScoreWeights())
    models = tiny_model.score_models
    assert models.part_names == ("logit", "late", "embedding")
    assert models.caption_vectors(["a dog"]).shape == (1, 0)
    assert models.image_vectors(torch.randn(2, *tiny_model.block_shape)).shape == (2, 0)
    with pytest.raises(ModelError, match="the bundle has no hubness correction: use only the parts logit, late, emb"):
        check_parts(parse_score("hubness=1", ScoreWeights()), models.part_names, "the bundle")
    with pytest.raises(ModelError, match="no pooled similarity"):
        check_parts(parse_score("logit=1,pooled=1", ScoreWeights()), models.part_names, "the bundle")
    with pytest.raises(UsageError, match="unknown part"):
        parse_score("joint", ScoreWeights())
