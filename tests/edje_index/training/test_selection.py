"""Choosing the weights of the final score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bf16 import as_tensor, to_bf16_array
from edje_index.query_bank import QueryBank
from edje_index.score_weights import ScoreWeights
from edje_index.training.bank import make_bank
from edje_index.training.batches import Features
from edje_index.training.config import SelectionConfig
from edje_index.training.dataset import CaptionSet
from edje_index.training.likelihood import likeliest_weights
from edje_index.training.objectives import trained_part
from edje_index.training.pooled import fit_pooled
from edje_index.training.selection import _choose_prior, _recall, choose_weights, make_dev_set
from edje_index.training.start import Origin, make_start
from tests.edje_index.training.conftest import IMAGES, captions


@pytest.fixture
def setting(case):
    bundle = make_start(Origin(case.bundle), case.config().architecture, 0)
    items = CaptionSet(np.arange(IMAGES) + 2, captions())
    return bundle, make_dev_set(items, bundle.text, case.features), Features(case.features)


@pytest.mark.parametrize("bank", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_recalls_are_those_of_the_plain_computation(case, setting, pooled, bank):
    """One pair at a time, by a bundle with the chosen weights; of both directions."""
    bundle, dev, features = setting
    adapter = trained_part(bundle.adapter)
    if pooled:
        bundle.joint.pooled = fit_pooled(adapter, bundle.joint, case.source(), 4)
    if bank:
        bundle = replace(bundle, bank=make_bank(adapter, bundle.joint, case.source(), case.features, 10), info=None)
    found = choose_weights(bundle, dev, features, SelectionConfig(dev_captions=1000, dev_pool=6), "cpu")
    assert (found.images.queries, found.images.pool) == (2 * IMAGES, 6)
    assert (found.captions.queries, found.captions.pool) == (IMAGES, 6)
    tokens = to_bf16_array(bundle.adapter(features.fetch(dev.rows).float()))
    similar = dev.text_embeddings @ dev.image_embeddings.T
    for choice, of_images in ((found.images, True), (found.captions, False)):
        w = choice.weights
        assert min(w) >= 0
        assert pooled or w.pooled == 0
        assert bank or w.prior == 0
        if of_images:
            bundle = replace(bundle, prior_weight=w.prior, prior_temperature=w.temperature, info=None)
            bundle.embedding_weight, bundle.joint.late_weight, bundle.joint.pooled_weight = (
                w.similarity,
                w.late,
                w.pooled,
            )
            priors = bundle.image_priors(dev.image_embeddings, tokens)
        else:
            bundle = replace(bundle, own_caption_weights=w, info=None)
            priors = bundle.caption_priors(dev.text_embeddings, dev.captions)
        bundle.joint.pooled_weight = 0.0
        hits = []
        for query in range(2 * IMAGES if of_images else IMAGES):
            rank = similar[query] if of_images else similar[:, query]
            near = sorted(range(len(rank)), key=lambda at, rank=rank: -rank[at])[:6]
            captions_of = [query] * 6 if of_images else near
            texts, blocks = [dev.captions[at] for at in captions_of], tokens[near if of_images else [query] * 6]
            logits = bundle.joint.score(texts, blocks).numpy()
            late = bundle.joint.late_interaction(texts, as_tensor(blocks)).numpy()
            whole = bundle.joint.pooled_similarity(texts, as_tensor(blocks)).numpy()
            final = logits + w.similarity * rank[near] + w.late * late + w.pooled * whole - priors[near]
            best = [near[scores.argmax()] for scores in (final, logits, rank[near])]
            hits.append([at == query // 2 if of_images else at // 2 == query for at in best])
        recalls = (choice.recall, choice.logit_recall, choice.embedding_recall)
        assert recalls == pytest.approx(np.mean(hits, axis=0))


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

    def priors(weights):
        return np.tile(bank.of_images(images, torch.zeros(5, 0), weights).numpy(), (3000, 1))

    weights, taken = _choose_prior(priors, ScoreWeights(similarity=2.0), scores, right)
    assert 0.6 < weights.prior < 1.4
    assert weights.similarity == 2
    assert _recall(scores - taken, right) > _recall(scores, right) + 0.02


def test_a_weight_that_is_given_is_not_looked_for(setting):
    bundle, dev, features = setting
    config = SelectionConfig(dev_captions=5, dev_pool=3, late_weight=7.0)
    found = choose_weights(bundle, dev, features, config, "cpu")
    assert (found.images.weights.late, found.captions.weights.late) == (7, 7)
    assert (found.images.queries, found.captions.queries, found.images.pool) == (5, 5, 3)


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


def test_any_of_several_right_answers_will_do():
    """The softmax gives its mass to the right ones together: a world where each of two is right."""
    rng = np.random.default_rng(0)
    logits, term = rng.standard_normal((2, 4000, 6))
    best = (logits + 2 * term + rng.gumbel(size=term.shape)).argmax(axis=1)
    right = np.arange(6) // 2 == best[:, None] // 2
    assert likeliest_weights(logits, (term,), right, [None]) == pytest.approx([2], rel=0.15)


def test_the_queries_are_always_the_same(setting):
    bundle, dev, features = setting
    config = SelectionConfig(dev_captions=7, dev_pool=3)
    assert choose_weights(bundle, dev, features, config, "cpu") == choose_weights(bundle, dev, features, config, "cpu")
