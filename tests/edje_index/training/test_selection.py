"""Choosing the weights of the final score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bf16 import as_tensor, to_bf16_array
from edje_index.query_bank import QueryBank
from edje_index.training.bank import make_bank
from edje_index.training.batches import Features
from edje_index.training.config import SelectionConfig
from edje_index.training.dataset import CaptionSet
from edje_index.training.objectives import trained_part
from edje_index.training.pooled import fit_pooled
from edje_index.training.selection import (
    _choose_prior,
    _recall,
    choose_weights,
    likeliest_weights,
    make_dev_set,
)
from edje_index.training.start import Origin, make_start
from tests.edje_index.training.conftest import IMAGES, captions


@pytest.fixture
def setting(case):
    bundle = make_start(Origin(case.bundle), case.config().architecture, 0)
    items = CaptionSet(np.arange(IMAGES) + 2, captions())
    return bundle, make_dev_set(items, bundle.text, case.features), Features(case.features)


@pytest.mark.parametrize("pooled", [False, True])
def test_recalls_are_those_of_the_plain_computation(case, setting, pooled):
    bundle, dev, features = setting
    if pooled:
        bundle.joint.pooled = fit_pooled(trained_part(bundle.adapter), bundle.joint, case.source(), 4)
    found = choose_weights(bundle, dev, features, SelectionConfig(dev_captions=1000, dev_pool=6), "cpu")
    assert (found.captions, found.pool) == (2 * IMAGES, 6)
    assert min(found.weights) >= 0
    assert pooled or found.weights.pooled == 0
    tokens = to_bf16_array(bundle.adapter(features.fetch(dev.rows).float()))
    hits = np.zeros(3)
    w, v, u = found.weights
    for at, text in enumerate(dev.captions):
        similar = dev.image_embeddings @ dev.text_embeddings[at]
        near = sorted(range(IMAGES), key=lambda image: -similar[image])[:6]
        logits = bundle.joint.score(text, tokens[near]).numpy()
        late = bundle.joint.late_interaction([text] * 6, as_tensor(tokens[near])).numpy()
        whole = bundle.joint.pooled_similarity([text] * 6, as_tensor(tokens[near])).numpy()
        fused = logits + w * similar[near] + v * late + u * whole
        hits += [near[scores.argmax()] == at // 2 for scores in (fused, logits, similar[near])]
    recalls = (found.recall, found.logit_recall, found.embedding_recall)
    assert recalls == pytest.approx(hits / (2 * IMAGES))


@pytest.mark.parametrize("pooled", [False, True])
def test_the_prior_of_a_bank_is_fitted_and_counted(case, setting, pooled):
    bundle, dev, features = setting
    adapter = trained_part(bundle.adapter)
    if pooled:
        bundle.joint.pooled = fit_pooled(adapter, bundle.joint, case.source(), 4)
    bundle = replace(bundle, bank=make_bank(adapter, bundle.joint, case.source(), case.features, 10), info=None)
    found = choose_weights(bundle, dev, features, SelectionConfig(dev_captions=1000, dev_pool=6), "cpu")
    w, v, u = found.weights
    assert found.prior.weight >= 0
    assert found.prior.temperature > 0
    bundle.bank.weight, bundle.bank.temperature = found.prior
    bundle.embedding_weight, bundle.joint.pooled_weight, bundle.joint.late_weight = w, u, v
    tokens = to_bf16_array(bundle.adapter(features.fetch(dev.rows).float()))
    priors = bundle.image_priors(dev.image_embeddings, tokens)
    hits = []
    for at, text in enumerate(dev.captions):
        similar = dev.image_embeddings @ dev.text_embeddings[at]
        near = sorted(range(IMAGES), key=lambda image: -similar[image])[:6]
        final = bundle.joint.score(text, tokens[near]).numpy() + w * similar[near] - priors[near]
        hits.append(near[final.argmax()] == at // 2)
    assert found.recall == pytest.approx(np.mean(hits))


def test_an_image_that_comes_up_for_everything_is_held_back():
    """Five images of which the first gets 3 more from every caption, in a world that knows nothing of that."""
    rng = np.random.default_rng(0)
    captions = torch.nn.functional.normalize(torch.randn(400, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    images = torch.nn.functional.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    captions[:, 0], images[:, 0] = 1.0, torch.tensor([1.5, 0, 0, 0, 0])
    bank = QueryBank.of((captions, torch.zeros(400, 0)), (images, torch.zeros(5, 0)))
    true = rng.standard_normal((3000, 5))
    right = np.arange(5) == (true + rng.gumbel(size=true.shape)).argmax(axis=1)[:, None]
    scores = true + 2.0 * np.array([1.5, 0, 0, 0, 0])
    which = np.tile(np.arange(5), (3000, 1))
    prior, taken = _choose_prior(bank, (images, torch.zeros(5, 0)), (2.0, 0.0), scores, which, right)
    assert 0.6 < prior.weight < 1.4
    assert _recall(scores - taken, right) > _recall(scores, right) + 0.02


def test_a_weight_that_is_given_is_not_looked_for(setting):
    bundle, dev, features = setting
    config = SelectionConfig(dev_captions=5, dev_pool=3, late_weight=7.0)
    assert choose_weights(bundle, dev, features, config, "cpu").weights.late == 7


def noisy_pools(weights: tuple[float, ...], captions: int = 4000, pool: int = 5):
    """Logits, terms and right answers of a world in which the softmax with these weights is the truth."""
    rng = np.random.default_rng(0)
    logits, *terms = rng.standard_normal((1 + len(weights), captions, pool))
    scores = logits + sum(w * term for w, term in zip(weights, terms, strict=True))
    best = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    return logits, terms, np.arange(pool) == best[:, None]


def test_the_true_weights_are_found():
    found = likeliest_weights(*noisy_pools((2.0, 0.5, 3.0)), [None] * 3)
    assert found == pytest.approx([2.0, 0.5, 3.0], rel=0.15)


def test_what_is_given_stays_beside_what_is_found():
    found = likeliest_weights(*noisy_pools((2.0, 0.5)), [2.0, None])
    assert found[0] == 2
    assert found[1] == pytest.approx(0.5, rel=0.2)


def test_no_weight_is_negative_and_the_others_are_found_without_it():
    logits, terms, right = noisy_pools((2.0, -1.0))
    found = likeliest_weights(logits, terms, right, [None, None])
    assert found[1] == 0
    assert found[0] == pytest.approx(likeliest_weights(logits, terms[:1], right, [None])[0], rel=1e-3)


def test_senseless_logits_are_outweighed():
    logits, terms, right = noisy_pools((2.0,))
    found = likeliest_weights(-logits, terms, right, [None])
    assert found[0] > 100


def test_pools_without_the_right_image_say_nothing():
    logits, terms, right = noisy_pools((2.0,))
    half = right & (np.arange(len(right)) % 2 == 0)[:, None]
    kept = (logits[::2], [term[::2] for term in terms], right[::2])
    assert likeliest_weights(logits, terms, half, [None]) == likeliest_weights(*kept, [None])
    assert likeliest_weights(logits, terms, right & False, [None]) == [0.0]


def test_a_sample_is_always_the_same(setting):
    _, dev, _ = setting
    first, again = dev.sample(7), dev.sample(7)
    assert first.captions == again.captions
    assert len(first.captions) == 7
    for text, owner in zip(first.captions, first.owner, strict=True):
        assert text in captions()[owner]
