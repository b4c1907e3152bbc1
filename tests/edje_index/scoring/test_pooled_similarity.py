from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.parts import Pairs
from edje_index.scoring.pooled_similarity import token_statistics, word_bags
from edje_index.scoring.weights import DirectionWeights, ScoreWeights
from tests.edje_index.scoring.bundles import random_pooled_similarity

CAPTIONS = ["a dog", "two cats and a house", "a dog", "zzz"]


@pytest.fixture
def bundle(tiny_bundle):
    bundle = ModelBundle.load(tiny_bundle)
    return replace(bundle, pooled=random_pooled_similarity(bundle, CAPTIONS[:2]), info=None)


def test_it_is_the_cosine_of_two_linear_maps(bundle):
    """Against NumPy in float64, caption by caption."""
    pooled, joint = bundle.pooled, bundle.joint
    tokens = torch.randn(len(CAPTIONS), *bundle.block_shape).bfloat16()
    maps = {name: value.double().numpy() for name, value in pooled.state_dict().items()}
    expected = []
    for caption, block in zip(CAPTIONS, tokens.double().numpy(), strict=True):
        seen = np.concatenate([block.mean(0), block.std(0), block.max(0)]) @ maps["image"] + maps["image_offset"]
        inputs = joint.tokenizer.inputs([caption], 0)
        hidden = joint.hidden_states(inputs, torch.empty(0, 0, joint.width))[0].detach().double().numpy().mean(0)
        words = set(joint.tokenizer.caption_ids([caption])[0])
        bag = np.array([w * (n in words) for n, w in zip(maps["word_numbers"], maps["word_weights"], strict=True)])
        bag /= np.linalg.norm(bag) or 1
        said = hidden @ maps["sentence"] + bag @ maps["words"] + maps["caption_offset"]
        expected.append(seen @ said / np.linalg.norm(seen) / np.linalg.norm(said))
    found = bundle.parts("t2i", ScoreWeights())["pooled"].of(Pairs(CAPTIONS, tokens))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert len(set(found.tolist())) == len(CAPTIONS)


def test_without_maps_vectors_have_no_width(tiny_model):
    vectors = tiny_model.pooled_vectors
    assert vectors.of_captions(["a dog"]).shape == (1, 0)
    assert vectors.of_images(torch.randn(2, *tiny_model.block_shape)).shape == (2, 0)


def test_a_bundle_keeps_it(bundle, tmp_path):
    score = DirectionWeights(t2i=ScoreWeights(pooled=2.5))
    info = replace(bundle, score=score).save(tmp_path / "with")
    again = ModelBundle.load(tmp_path / "with")
    assert info.score == again.score == score
    assert info.pooled_similarity == bundle.pooled.sizes
    for name, value in bundle.pooled.state_dict().items():
        assert torch.equal(value, again.pooled.state_dict()[name])


def test_a_bundle_without_keeps_its_fingerprint(tiny_bundle, tmp_path):
    bundle = ModelBundle.load(tiny_bundle)
    assert replace(bundle, info=None).save(tmp_path / "same").fingerprint == bundle.info.fingerprint


def test_one_token_has_no_deviation():
    tokens = torch.randn(2, 1, 3)
    expected = torch.cat([tokens[:, 0], torch.zeros(2, 3), tokens[:, 0]], dim=1)
    torch.testing.assert_close(token_statistics(tokens), expected)


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
