"""Weights by maximum likelihood, in worlds whose weights are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.scoring.weights import ScoreWeights
from edje_index.training.fitting.likelihood import BankProducts, likeliest_weights, likeliest_with_prior

TRUE = ScoreWeights(2.0, 0.5, 1.0, 1.0, 1.0)


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


def a_world_with_hubs(weights: ScoreWeights, queries: int = 4000, images: int = 40, pool: int = 6):
    """Logits, terms, right answers and the products with a bank, in which the final score with `weights` is the truth.

    Images differ in how near they are to captions of the bank; what the logits say holds that too.
    """
    rng = np.random.default_rng(0)
    similarities, pooled = (torch.from_numpy(rng.standard_normal((images, 30)) * 0.2) for _ in range(2))
    similarities += torch.from_numpy(rng.standard_normal((images, 1)))
    bank = BankProducts(similarities, pooled, rng.integers(0, images, (queries, pool)))
    logits, *terms = rng.standard_normal((4, queries, pool))
    logits += weights.prior * bank.priors(weights)
    added = sum(weight * term for weight, term in zip(weights[:3], terms, strict=True))
    final = logits + added - weights.prior * bank.priors(weights)
    best = (final + rng.gumbel(size=final.shape)).argmax(axis=1)
    return logits, terms, np.arange(pool) == best[:, None], bank


def test_the_prior_is_found_with_what_it_holds():
    logits, terms, right, bank = a_world_with_hubs(TRUE)
    found = likeliest_with_prior(logits, terms, right, [None] * 3, bank)
    assert found[:3] == pytest.approx(TRUE[:3], rel=0.15)
    values, wanted = (w.prior * bank.priors(w) for w in (found, TRUE))
    assert np.corrcoef(values.ravel(), wanted.ravel())[0, 1] > 0.99
    assert values.std() == pytest.approx(wanted.std(), rel=0.15)
    on_top = likeliest_weights(logits, terms, right, [None] * 3)
    assert abs(on_top[0] - 2.0) > abs(found.similarity - 2.0), "without the prior the others make up for it"


@pytest.mark.parametrize("queries", [30, 100, 500])
def test_few_queries_do_not_lose_it(queries):
    """Every search ends in finite weights that are likelier than none; from 500 queries on near the truth."""
    logits, terms, right, bank = a_world_with_hubs(TRUE)
    rng = np.random.default_rng(1)
    for _ in range(12):
        some = rng.permutation(len(logits))[:queries]
        single = BankProducts(bank.similarities.float(), bank.pooled.float(), bank.which[some])
        found = likeliest_with_prior(logits[some], [term[some] for term in terms], right[some], [None] * 3, single)
        assert np.isfinite(found).all()
        assert found.prior > 0
        assert queries < 500 or 0.5 < (found.prior * single.priors(found)).std() / single.priors(TRUE).std() < 2


def test_what_is_given_stays_with_a_prior():
    logits, terms, right, bank = a_world_with_hubs(TRUE)
    found = likeliest_with_prior(logits, terms, right, [2.0, 0.0, None], bank)
    assert found[:2] == (2.0, 0.0)
    assert found.pooled == pytest.approx(1.0, rel=0.2)
    assert found.prior > 0.5


def test_a_prior_without_gain_has_no_weight():
    logits, terms, right, bank = a_world_with_hubs(ScoreWeights(2.0, 0.5, 1.0, 0.0, 1.0))
    flat = BankProducts(torch.zeros(40, 30), torch.zeros(40, 30), bank.which)
    found = likeliest_with_prior(logits, terms, right, [None] * 3, flat)
    assert found == ScoreWeights(*likeliest_weights(logits, terms, right, [None] * 3))


def test_nothing_to_learn_from_takes_no_prior():
    logits, terms, right, bank = a_world_with_hubs(TRUE, queries=20)
    assert likeliest_with_prior(logits, terms, right & False, [None, 3.0, None], bank) == ScoreWeights(0.0, 3.0, 0.0)


def test_a_pool_of_one_says_nothing():
    one = np.ones((1, 1), dtype=np.float32)
    assert likeliest_weights(one, [one, one], one > 0, [None, 2.0]) == [0.0, 2.0]
