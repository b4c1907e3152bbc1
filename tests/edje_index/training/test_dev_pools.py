"""Choosing the weights of the final score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edje_index.models.devices import to_bf16_array
from edje_index.scoring.parts import Pairs
from edje_index.training.config import FittingConfig
from edje_index.training.data.dataset import CaptionSet, DevCaptions
from edje_index.training.data.features import StoredFeatures
from edje_index.training.fitting.dev_pools import choose_dev_weights, make_dev_set
from edje_index.training.fitting.hubness_bank import make_hubness_bank
from edje_index.training.fitting.pooled_similarity import fit_pooled_similarity
from edje_index.training.model.start_bundle import Origin, make_start
from edje_index.training.model.trained_part import trained_part
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.training.conftest import IMAGES, captions


@pytest.fixture
def setting(case):
    bundle = make_start(Origin(case.bundle), case.config().architecture, 0)
    items = CaptionSet(np.arange(IMAGES) + 2, captions())
    bundle.joint.eval()
    dev = DevCaptions(items, read_embeddings(CommittedIndex.open(case.features), items.rows))
    return (
        bundle,
        make_dev_set(dev, bundle.text.encode(items.texts())),
        StoredFeatures(CommittedIndex.open(case.features)),
    )


@pytest.mark.parametrize(
    ("pooled", "bank"),
    [
        (False, False),
        (True, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_recalls_are_those_of_the_plain_computation(case, setting, pooled, bank):
    """One query at a time, by the parts of a bundle with the chosen weights; in both directions."""
    bundle, dev, features = setting
    adapter = trained_part(bundle.adapter)
    if pooled:
        fitted = fit_pooled_similarity(adapter, bundle.joint, case.source(), 4)
        bundle = replace(bundle, pooled=fitted, info=None)
    if bank:
        made = make_hubness_bank(adapter, bundle.pooled_vectors, case.source(), 10)
        bundle = replace(bundle, hubness_bank=made, info=None)
    # Late interaction of random tokens says nothing: a weight that is given makes it count.
    config = FittingConfig(dev_captions=1000, dev_pool=6, late_weight=3.0 if pooled else None)
    choices = choose_dev_weights(bundle, dev, features, config)
    assert (choices["t2i"].queries, choices["t2i"].pool) == (2 * IMAGES, 6)
    assert (choices["i2t"].queries, choices["i2t"].pool) == (IMAGES, 6)
    tokens = to_bf16_array(bundle.adapter(features.fetch(dev.rows).float()))
    similar = dev.text_embeddings @ dev.image_embeddings.T
    for direction, choice in choices.items():
        weights, text_queries = choice.weights.by_part(), direction == "t2i"
        assert min(weights.values()) >= 0
        assert pooled or weights["pooled"] == 0
        assert bank or weights["hubness"] == 0
        parts = bundle.parts(direction, choice.weights)
        hits = []
        for query in range(2 * IMAGES if text_queries else IMAGES):
            rank = similar[query] if text_queries else similar[:, query]
            near = sorted(range(len(rank)), key=lambda at, rank=rank: -rank[at])[:6]
            texts = [dev.captions[at] for at in ([query] * 6 if text_queries else near)]
            embeddings = dev.image_embeddings[near] if text_queries else dev.text_embeddings[near]
            pairs = Pairs(texts, tokens[near if text_queries else [query] * 6], rank[near], embeddings)
            final = sum(weight * parts[part].of(pairs) for part, weight in weights.items() if weight)
            best = [near[scores.argmax()] for scores in (final, parts["logit"].of(pairs), rank[near])]
            hits.append([at == query // 2 if text_queries else at // 2 == query for at in best])
        recalls = (choice.recall, choice.logit_recall, choice.embedding_recall)
        assert recalls == pytest.approx(np.mean(hits, axis=0))


def test_a_given_weight_is_not_fitted(setting):
    bundle, dev, features = setting
    config = FittingConfig(dev_captions=5, dev_pool=3, late_weight=7.0)
    choices = choose_dev_weights(bundle, dev, features, config)
    assert [choices[direction].weights.late for direction in ("t2i", "i2t")] == [7, 7]
    assert [choice.queries for choice in choices.values()] == [5, 5]
    assert choices["t2i"].pool == 3


def test_the_queries_are_always_the_same(setting):
    bundle, dev, features = setting
    config = FittingConfig(dev_captions=7, dev_pool=3)
    choices = [choose_dev_weights(bundle, dev, features, config) for _ in range(2)]
    assert choices[0] == choices[1]


def test_progress_counts_the_queries_of_both_directions(setting):
    bundle, dev, features = setting
    reports = []
    config = FittingConfig(dev_captions=5, dev_pool=3)
    choose_dev_weights(bundle, dev, features, config, lambda *report: reports.append(report[1:]))
    assert reports[:5] == [(done, 10) for done in range(5)]
    assert reports[-1] == (10, 10)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
