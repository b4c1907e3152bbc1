"""Choosing the weights of the final score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edje_index.models.bf16 import as_tensor, to_bf16_array
from edje_index.training.config import FittingConfig
from edje_index.training.data.batches import Features
from edje_index.training.data.dataset import CaptionSet
from edje_index.training.fitting.hubness_bank import make_bank
from edje_index.training.fitting.pooled_similarity import fit_pooled
from edje_index.training.fitting.selection import choose_weights, make_dev_set
from edje_index.training.model.objectives import trained_part
from edje_index.training.model.start_bundle import Origin, make_start
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
    # Late interaction of random tokens says nothing: a weight that is given makes it count.
    config = FittingConfig(dev_captions=1000, dev_pool=6, late_weight=3.0 if pooled else None)
    found = choose_weights(bundle, dev, features, config, "cpu")
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
            bundle.embedding_weight, bundle.joint.pooled_weight = w.similarity, w.pooled
            priors = bundle.image_priors(dev.image_embeddings, tokens)
        else:
            bundle = replace(bundle, own_caption_weights=w, info=None)
            priors = bundle.caption_priors(dev.text_embeddings, dev.captions)
        bundle.joint.late_weight, bundle.joint.pooled_weight = 0.0, 0.0
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


def test_a_weight_that_is_given_is_not_looked_for(setting):
    bundle, dev, features = setting
    config = FittingConfig(dev_captions=5, dev_pool=3, late_weight=7.0)
    found = choose_weights(bundle, dev, features, config, "cpu")
    assert (found.images.weights.late, found.captions.weights.late) == (7, 7)
    assert (found.images.queries, found.captions.queries, found.images.pool) == (5, 5, 3)


def test_the_queries_are_always_the_same(setting):
    bundle, dev, features = setting
    config = FittingConfig(dev_captions=7, dev_pool=3)
    assert choose_weights(bundle, dev, features, config, "cpu") == choose_weights(bundle, dev, features, config, "cpu")
