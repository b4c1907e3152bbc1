"""The weighted sum of the parts of a score, and each part alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edje_index.errors import ModelError
from edje_index.scoring import parts
from edje_index.scoring.parts import (
    Images,
    content_token_mask,
    late_interaction,
)
from edje_index.scoring.weights import (
    MAX_WEIGHT,
    PART_NAMES,
    ScoreWeights,
    parse_score,
    relevance,
)
from edje_index.training.step import alignment_scores
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts

NUMBERS = st.floats(-8, 8, width=16)


def test_arrays_and_tensors_are_summed_alike():
    rng = np.random.default_rng(0)
    parts = {part: rng.standard_normal((4, 3), np.float32) for part in PART_NAMES}
    weights = WEIGHTS.t2i
    expected = sum(weight * parts[part] for part, weight in weights.by_part().items())
    assert weights.sum(parts).dtype == np.float32
    tensors = {part: torch.from_numpy(parts[part]) for part in parts}
    for total in (weights.sum(parts), weights.sum(tensors).numpy()):
        np.testing.assert_allclose(total, expected, atol=1e-5)
    joint = weights.only(["logit", "late"]).sum(parts)
    np.testing.assert_allclose(joint, parts["logit"] + 0.75 * parts["late"], atol=1e-6)
    assert ScoreWeights(logit=0, embedding=1).only(["logit", "late"]).parts == ()
    with pytest.raises(ValueError, match="other than 0"):
        ScoreWeights(logit=0.0).sum(parts)


def test_relevance_follows_the_order_of_the_scores():
    scores = np.array([-1e6, -40, -1, 0, 0.5, 40, 1e6], np.float32)
    for weights in (ScoreWeights(late=3.0), ScoreWeights(calibration=(0.5, -2.0))):
        rated = relevance(scores, weights)
        assert ((rated >= 0) & (rated <= 1)).all()
        assert (np.diff(rated) >= 0).all()
    logistic = 1 / (1 + np.exp(-2))
    assert relevance(np.array([2.0]), ScoreWeights()) == pytest.approx(logistic)
    cosines = ScoreWeights(logit=0, embedding=2)
    assert relevance(np.array([2.0, -2.0]), cosines) == pytest.approx([1, 0])
    with pytest.raises(ValueError, match="must be positive"):
        ScoreWeights(calibration=(0.0, 1.0))


@given(
    arrays(np.float32, (3, 6), elements=NUMBERS),
    st.integers(1, 7),
    st.sampled_from([-0.5, 0.25, 2.0]),
)
def test_the_first_hits_are_found_without_the_logits_of_the_others(parts, k, weight):
    """With exact sums of small numbers."""
    score = ScoreWeights(logit=weight, late=1.0, embedding=4.0)
    logit, late, embedding = np.round(parts)
    final = score.sum({"logit": logit, "late": late, "embedding": embedding})
    others = {"late": late, "embedding": embedding}
    mask = score.may_be_first(others, k, (logit.min(), logit.max()))
    assert set(np.flatnonzero(final >= np.sort(final)[-min(k, 6)])) <= set(
        np.flatnonzero(mask)
    )
    assert mask.sum() >= min(k, 6)
    best = np.sort(late + 4 * embedding)[-min(k, 6)]
    np.testing.assert_array_equal(
        score.may_be_first(others, k, (1.0, 1.0)),
        (late + 4 * embedding >= best) | (k > 6),
    )


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("logit", {"logit": 1}),
        ("late=2.5", {"late": 2.5}),
        (
            "logit=1, embedding = 20 ,late=0.5",
            {"logit": 1, "embedding": 20, "late": 0.5},
        ),
    ],
)
def test_parts_that_are_not_named_have_no_weight(score, expected):
    weights = parse_score(score, WEIGHTS.t2i)
    assert weights.by_part() == expected
    assert parse_score("bundle", WEIGHTS.i2t) == WEIGHTS.i2t
    assert parse_score(WEIGHTS.t2i, WEIGHTS.i2t) == WEIGHTS.t2i


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


def part(scorer, name, tokens):
    return scorer.parts([name], CAPTIONS, scorer.images(tokens))[name]


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
    for words, is_content in (
        (("[CLS]", "[MASK]", "<image>", ".", "the", "a", "of"), False),
        (("b", "##z", "7"), True),
    ):
        for word in words:
            assert content[tokenizer.tokenizer.token_to_id(word)] == is_content, word
    expected = late_interaction(
        tokenizer.caption_ids(CAPTIONS),
        tokens,
        scorer.joint.word_vectors,
        content,
        mean=scorer.joint.mean_word_vector,
    )
    scores = part(scorer, "late", tokens)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    # the last caption has stop words only
    assert (scores != 0).tolist() == [True, True, True, False]


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
        late_interaction(captions, tokens, words, content, mean=mean), expected
    )
    without_words = late_interaction([[3], []], tokens[:2], words, content, mean=mean)
    assert without_words.tolist() == [0.0, 0.0]


def test_pooled_similarity_is_the_cosine_of_two_linear_maps(bundle, scorer, tokens):
    """Against NumPy in float64, caption by caption."""
    joint = bundle.joint
    maps = {
        name: value.double().numpy()
        for name, value in bundle.pooled.state_dict().items()
    }
    expected = []
    for caption, block in zip(CAPTIONS, tokens.double().numpy(), strict=True):
        seen = np.concatenate([block.mean(0), block.std(0), block.max(0)])
        seen = seen @ maps["image"] + maps["image_offset"]
        inputs = joint.tokenizer.inputs([caption], 0)
        with torch.inference_mode():
            hidden = joint.hidden_states(inputs, torch.empty(0, 0, joint.width))[0]
        words = joint.tokenizer.caption_ids([caption])[0]
        bag = maps["word_weights"] * np.isin(maps["word_numbers"], words)
        bag /= np.linalg.norm(bag) or 1
        said = hidden.double().numpy().mean(0) @ maps["sentence"]
        said += bag @ maps["words"] + maps["caption_offset"]
        expected.append(seen @ said / np.linalg.norm(seen) / np.linalg.norm(said))
    np.testing.assert_allclose(part(scorer, "pooled", tokens), expected, atol=2e-5)


def test_rows_get_their_own_values_although_they_share_slots(monkeypatch):
    monkeypatch.setattr(parts, "_SLOTS", 8)
    computed = []

    def images(tokens):
        computed.extend(tokens)
        return Images(tokens, tokens[:, :1], -tokens)

    scorer = SimpleNamespace(pooled_dim=1, images=images)
    cache = parts.ImageCache(scorer, 1)
    for rows in np.random.default_rng(0).integers(0, 40, (50, 6)):
        tokens = torch.from_numpy(rows[:, None].astype(np.float32))
        found = cache.images(rows, tokens)
        assert found.tokens is tokens
        torch.testing.assert_close(found.pooled, tokens)
        torch.testing.assert_close(found.token_scales, -tokens)
    # some were in the cache
    assert len(computed) < 300
    scorer.images = None
    torch.testing.assert_close(cache.images(rows[-1:], None).pooled, tokens[-1:])
