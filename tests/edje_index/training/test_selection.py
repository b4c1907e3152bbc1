"""Choosing the embedding's weight."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edje_index.bf16 import as_tensor, to_bf16_array
from edje_index.training.batches import Features
from edje_index.training.config import SelectionConfig
from edje_index.training.dataset import CaptionSet
from edje_index.training.objectives import trained_part
from edje_index.training.pooled import fit_pooled
from edje_index.training.selection import GRID, choose_weights, make_dev_set
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
    tokens = to_bf16_array(bundle.adapter(features.fetch(dev.rows).float()))
    pooled_grid = GRID if pooled else (0.0,)
    hits = dict.fromkeys(itertools.product(GRID, GRID, pooled_grid), 0)
    embedding_hits = 0
    for at, text in enumerate(dev.captions):
        similar = dev.image_embeddings @ dev.text_embeddings[at]
        near = sorted(range(IMAGES), key=lambda image: -similar[image])[:6]
        embedding_hits += near[0] == at // 2
        logits = bundle.joint.score(text, tokens[near]).numpy()
        late = bundle.joint.late_interaction([text] * 6, as_tensor(tokens[near])).numpy()
        whole = bundle.joint.pooled_similarity([text] * 6, as_tensor(tokens[near])).numpy()
        for w, v, u in hits:
            best = (logits + w * similar[near] + v * late + u * whole).argmax()
            hits[w, v, u] += near[best] == at // 2
    assert found.recall == pytest.approx({weights: count / (2 * IMAGES) for weights, count in hits.items()})
    assert found.embedding_recall == pytest.approx(embedding_hits / (2 * IMAGES))
    assert found.recall[found.weights] == max(found.recall.values())


def test_a_weight_that_is_given_is_not_looked_for(setting):
    bundle, dev, features = setting
    config = SelectionConfig(dev_captions=5, dev_pool=3, late_weight=7.0)
    assert set(choose_weights(bundle, dev, features, config, "cpu").recall) == {(w, 7.0, 0.0) for w in GRID}


def test_a_sample_is_always_the_same(setting):
    _, dev, _ = setting
    first, again = dev.sample(7), dev.sample(7)
    assert first.captions == again.captions
    assert len(first.captions) == 7
    for text, owner in zip(first.captions, first.owner, strict=True):
        assert text in captions()[owner]
