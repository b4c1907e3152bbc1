"""Each part of a bundle's score alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.hubness import hubness
from edje_index.scoring.late_interaction import late_interaction
from edje_index.scoring.parts import Pairs
from edje_index.scoring.stop_words import content_token_mask
from edje_index.scoring.weights import DirectionWeights, ScoreWeights, check_parts, parse_score
from storage_formats import UsageError
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts, unit

CAPTIONS = ["a dog", "two cats and a house", "a dog", "of the"]


@pytest.fixture
def bundle(tiny_bundle) -> ModelBundle:
    return bundle_with_all_parts(tiny_bundle)


@pytest.fixture
def pairs(bundle) -> Pairs:
    tokens = torch.randn(4, *bundle.block_shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    similarities = np.linspace(-1, 1, 4, dtype=np.float32)
    return Pairs(CAPTIONS, tokens, similarities, unit(4, 24, 8).numpy())


def test_the_logit_is_the_joint_encoder_alone(bundle, pairs):
    logits = bundle.parts("t2i", WEIGHTS.t2i)["logit"].of(pairs)
    np.testing.assert_array_equal(logits, bundle.joint.score(pairs.captions, pairs.tokens).numpy())
    inputs = bundle.joint.tokenizer.inputs(CAPTIONS, bundle.block_shape[0])
    with torch.inference_mode():
        np.testing.assert_allclose(logits, bundle.joint(inputs, pairs.tokens).numpy(), atol=1e-6)


def test_late_interaction_reads_the_words_of_the_joint_encoder(bundle, pairs):
    ids = bundle.joint.tokenizer.caption_ids(CAPTIONS)
    content = content_token_mask(bundle.joint.tokenizer)
    expected = late_interaction(ids, pairs.tokens, bundle.joint.scorer().word_vectors, content)
    scores = bundle.parts("t2i", WEIGHTS.t2i)["late"].of(pairs)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert (np.abs(scores[:3]) > 0).all()
    assert scores[3] == 0, "a caption of stop words"


def test_stop_words_and_special_tokens_do_not_count(bundle):
    mask = content_token_mask(bundle.joint.tokenizer)
    token_id = bundle.joint.tokenizer.tokenizer.token_to_id
    assert not mask[[token_id(word) for word in ("[CLS]", "[MASK]", "<image>", ".", "the", "a", "of")]].any()
    assert mask[[token_id(word) for word in ("b", "##z", "7")]].all()


def test_embedding_similarity_is_given(bundle, pairs):
    assert bundle.parts("t2i", WEIGHTS.t2i)["embedding"].of(pairs) is pairs.similarities


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_the_hubness_correction_is_that_of_the_candidates(bundle, pairs, direction):
    """Minus the mean likelihood over the bank, by the formula on dense vectors, above the floor."""
    weights, bank = WEIGHTS.of(direction), bundle.hubness_bank
    vectors = bundle.pooled_vectors
    own = vectors.of_images(pairs.tokens) if direction == "t2i" else vectors.of_captions(CAPTIONS)
    products = bank.products(torch.from_numpy(pairs.candidate_embeddings), own, direction)
    similarity = weights.hubness_similarity
    plain = hubness(
        *products, embedding=similarity.embedding, pooled=similarity.pooled, temperature=similarity.temperature
    )
    expected = -plain.clamp(min=bank.floor(similarity, direction)).numpy()
    values = bundle.parts(direction, weights)["hubness"].of(pairs)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert values.std() > 0.1


def test_scores_do_not_depend_on_the_batch(bundle):
    tokens = torch.randn(300, *bundle.block_shape).bfloat16()
    pairs = Pairs(["a dog"] * 300, tokens, np.zeros(300, np.float32), unit(300, 24).numpy())
    parts = bundle.parts("t2i", WEIGHTS.t2i)
    whole = FinalScore.of(WEIGHTS.t2i).compute(parts, pairs)
    for row in (0, 150, 299):
        alone = Pairs(
            ["a dog"], tokens[row : row + 1], np.zeros(1, np.float32), pairs.candidate_embeddings[row : row + 1]
        )
        for part, values in FinalScore.of(WEIGHTS.t2i).compute(parts, alone).items():
            np.testing.assert_allclose(values[0], whole[part][row], atol=1e-4)


def test_bfloat16_rounds_the_logits_alone(bundle, pairs, monkeypatch):
    parts = bundle.parts("t2i", WEIGHTS.t2i)
    exact = {name: part.of(pairs) for name, part in parts.items()}
    monkeypatch.setattr(bundle.joint, "compute_dtype", torch.bfloat16)
    rounded = {name: part.of(pairs) for name, part in bundle.parts("t2i", WEIGHTS.t2i).items()}
    changed = {name for name in parts if not np.array_equal(exact[name], rounded[name])}
    assert changed == {"logit"}


def test_a_bundle_without_parts_scores_by_the_logit(tiny_model):
    assert tiny_model.score == DirectionWeights(ScoreWeights(), ScoreWeights())
    parts = tiny_model.parts("t2i", ScoreWeights())
    assert set(parts) == {"logit", "late", "embedding"}
    with pytest.raises(ModelError, match="the bundle has no hubness correction: use only the parts logit, late, emb"):
        check_parts(parse_score("hubness=1", ScoreWeights()), parts, "the bundle")
    with pytest.raises(ModelError, match="no pooled similarity"):
        check_parts(parse_score("logit=1,pooled=1", ScoreWeights()), parts, "the bundle")
    with pytest.raises(UsageError, match="unknown part"):
        parse_score("joint", ScoreWeights())


def test_what_does_not_depend_on_the_pair_is_computed_once(bundle, pairs, monkeypatch):
    computed = []
    of_images = type(bundle.pooled_vectors).of_images
    monkeypatch.setattr(
        type(bundle.pooled_vectors), "of_images", lambda self, tokens: computed.append(1) or of_images(self, tokens)
    )
    parts = bundle.parts("t2i", WEIGHTS.t2i)
    values = {part: parts[part].of(pairs) for part in ("pooled", "hubness")}
    assert len(computed) == 1
    again = Pairs(pairs.captions, pairs.tokens, pairs.similarities, pairs.candidate_embeddings)
    for part, value in values.items():
        np.testing.assert_array_equal(parts[part].of(again), value)
