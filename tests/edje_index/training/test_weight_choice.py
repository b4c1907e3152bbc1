"""What a choice of weights says of itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edje_index.scoring.weights import ScoreWeights
from edje_index.training.fitting.likelihood import BankProducts, likeliest_weights
from edje_index.training.fitting.weight_choice import Candidates, choose

FREE = (None, None, None)


def candidates(queries: int, images: int, *, signal: float = 0.0, bank: bool = False, seed: int = 0) -> Candidates:
    """Random parts, the first candidate right and `signal` better; queries of one image next to each other."""
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((4, queries, 5)).astype(np.float32)
    parts[1:, :, 0] += signal
    order = rng.permuted(np.tile(np.arange(5), (queries, 1)), axis=1)
    shuffled = (np.take_along_axis(part, order, axis=1) for part in parts)
    products = BankProducts(
        torch.from_numpy(rng.standard_normal((9, 7))),
        torch.from_numpy(rng.standard_normal((9, 7))),
        rng.integers(0, 9, (queries, 5)),
        lambda weights: -math.inf,
    )
    owner = np.arange(queries) * images // queries + 40
    return Candidates(*shuffled, right=order == 0, images=owner, bank=products if bank else None)


def test_held_out_queries_are_sorted_with_weights_of_other_images():
    """Each query alone, by the sum itself, with weights fitted to the queries of the images in other fifths."""
    asked = candidates(60, 12, signal=0.4)
    hits = []
    for query in range(60):
        kept = [other for other in range(60) if (asked.images[other] - asked.images[query]) % 5]
        terms = [asked.similarities[kept], asked.late[kept], asked.pooled[kept]]
        weights = likeliest_weights(asked.logits[kept], terms, asked.right[kept], FREE)
        row = [part[query] for part in (asked.similarities, asked.late, asked.pooled)]
        final = asked.logits[query] + sum(w * part for w, part in zip(weights, row, strict=True))
        hits.append(asked.right[query][final.argmax()])
    assert choose(asked, FREE).held_out_recall == pytest.approx(np.mean(hits))


def test_chance_does_not_flatter_what_is_held_out():
    """Parts that say nothing: fitted to few queries they seem to help those, and no others (chance is 0.2)."""
    found = [choose(candidates(20, 20, seed=seed), FREE) for seed in range(40)]
    assert np.mean([choice.recall for choice in found]) > 0.26
    assert np.mean([choice.held_out_recall for choice in found]) == pytest.approx(0.2, abs=0.04)


def test_some_of_the_queries_keep_their_candidates_priors():
    asked, weights = candidates(60, 12, bank=True), ScoreWeights(1.0, 1.0, 1.0, 2.0, 1.5)
    some = asked.images % 3 == 0
    assert (asked.of(some).hits(weights) == asked.hits(weights)[some]).all()
    assert (asked.hits(weights) != asked.hits(weights._replace(prior=0.0))).any()
    assert asked.of(some).fit(FREE).prior >= 0


def test_every_fit_can_be_stopped():
    asked, fits = candidates(30, 10, signal=0.5), []
    choose(asked, FREE, lambda: fits.append(None))
    assert len(fits) == 1 + 5

    def stop() -> None:
        fits.pop()
        if len(fits) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(asked, FREE, stop)


def test_given_weights_are_worth_the_same_on_all():
    asked = candidates(30, 10, signal=0.5)
    choice = choose(asked, (1.0, 2.0, 0.5))
    assert choice.held_out_recall == choice.recall
    assert choice.weights[:3] == (1.0, 2.0, 0.5)


def test_one_image_leaves_nothing_to_hold_out():
    assert choose(candidates(4, 1), FREE).held_out_recall is None
