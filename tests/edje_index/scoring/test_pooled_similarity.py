from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.pooled_similarity import PooledSimilarity, pooled_tokens, word_bags

CAPTIONS = ["a dog", "two cats and a house", "a dog", "zzz"]


@pytest.fixture
def bundle(tiny_bundle):
    """With a pooled similarity of random numbers."""
    bundle = ModelBundle.load(tiny_bundle)
    numbers = sorted({word for ids in bundle.joint.tokenizer.caption_ids(CAPTIONS[:2]) for word in ids})
    pooled = PooledSimilarity(bundle.joint.width, len(numbers), 5)
    rng = torch.Generator().manual_seed(1)
    pooled.load_state_dict({name: torch.randn(v.shape, generator=rng) for name, v in pooled.state_dict().items()})
    pooled.word_numbers = torch.tensor(numbers)
    pooled.word_weights.abs_()
    bundle.joint.pooled = pooled
    return bundle


def test_it_is_the_cosine_of_two_linear_maps(bundle):
    """Against NumPy in float64, caption by caption."""
    pooled, joint = bundle.joint.pooled, bundle.joint
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
    found = joint.pooled_similarity(CAPTIONS, tokens)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
    assert len(set(found.tolist())) == len(CAPTIONS)


def test_it_is_added_to_the_logit_with_its_weight(bundle):
    tokens = torch.randn(len(CAPTIONS), *bundle.block_shape)
    logits = bundle.joint.score(CAPTIONS, tokens)
    similar = bundle.joint.pooled_similarity(CAPTIONS, tokens)
    bundle.joint.pooled_weight = 3.0
    torch.testing.assert_close(bundle.joint.score(CAPTIONS, tokens), logits + 3 * similar)


def test_without_one_it_is_nothing(tiny_bundle):
    joint = ModelBundle.load(tiny_bundle).joint
    assert not joint.pooled_similarity(["a dog"], torch.randn(1, 4, joint.width)).any()


def test_a_bundle_keeps_it(bundle, tmp_path):
    bundle.joint.pooled_weight = 2.5
    info = replace(bundle, info=None).save(tmp_path / "with")
    again = ModelBundle.load(tmp_path / "with").joint
    assert (info.weights.pooled, again.pooled_weight) == (2.5, 2.5)
    assert again.pooled is not None
    for name, value in bundle.joint.pooled.state_dict().items():
        assert torch.equal(value, again.pooled.state_dict()[name])


def test_a_bundle_without_keeps_its_fingerprint(tiny_bundle, tmp_path):
    bundle = ModelBundle.load(tiny_bundle)
    assert replace(bundle, info=None).save(tmp_path / "same").fingerprint == bundle.fingerprint


def test_one_token_has_no_deviation():
    tokens = torch.randn(2, 1, 3)
    expected = torch.cat([tokens[:, 0], torch.zeros(2, 3), tokens[:, 0]], dim=1)
    torch.testing.assert_close(pooled_tokens(tokens), expected)


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
