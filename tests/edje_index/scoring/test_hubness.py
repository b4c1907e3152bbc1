"""The prior of the query bank, against NumPy in float64; kept in bundles; taken off in every place that re-ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BANK_WEIGHTS, INFO_FILE, read_bundle_info
from edje_index.errors import ModelError
from edje_index.scoring.hubness import QueryBank
from edje_index.scoring.pooled_similarity import PooledSimilarity
from edje_index.scoring.weights import ScoreWeights


def unit(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(values, dim=1)


def a_bank(dim: int = 5) -> QueryBank:
    return QueryBank.of((unit(7, 24, 1), unit(7, dim, 2)), (unit(9, 24, 3), unit(9, dim, 4)))


def with_bank(path) -> ModelBundle:
    """The bundle at `path` with a pooled similarity of random numbers and a bank."""
    bundle = ModelBundle.load(path)
    pooled = PooledSimilarity(bundle.joint.width, 0, 5)
    rng = torch.Generator().manual_seed(1)
    pooled.load_state_dict({name: torch.randn(v.shape, generator=rng) for name, v in pooled.state_dict().items()})
    pooled.word_numbers = torch.zeros(0, dtype=torch.int64)
    bundle.joint.pooled, bundle.joint.pooled_weight, bundle.embedding_weight = pooled, 3.0, 20.0
    return replace(bundle, bank=a_bank(), prior_weight=0.5, prior_temperature=2.0, info=None)


def expected(embeddings, vectors, others, own, weights, t):
    """The definition, without the care for large exponents; `own` are those of the bank on the same side."""

    def priors(*side):
        parts = [values.double().numpy() for values in (*side, *others)]
        scores = weights[0] * parts[0] @ parts[2].T + weights[1] * parts[1] @ parts[3].T
        return t * np.log(np.exp(scores / t).mean(axis=1))

    return np.maximum(priors(embeddings, vectors), np.quantile(priors(*own), 0.1))


@settings(max_examples=30)
@given(
    weights=st.tuples(st.floats(0, 30), st.floats(0, 30)),
    temperature=st.floats(0.5, 30),
    dim=st.sampled_from([0, 1, 5]),
)
def test_it_is_the_soft_maximum_over_the_bank(weights, temperature, dim):
    bank, used = a_bank(dim), ScoreWeights(weights[0], 9.0, weights[1], 0.3, temperature)
    embeddings, vectors = unit(6, 24, 5), unit(6, dim, 6)
    captions = (bank.caption_embeddings.dense(), bank.caption_vectors.dense())
    images = (bank.image_embeddings.dense(), bank.image_vectors.dense())
    found = bank.of_images(embeddings, vectors, used)
    np.testing.assert_allclose(found, expected(embeddings, vectors, captions, images, weights, temperature), atol=1e-3)
    found = bank.of_captions(embeddings, vectors, used)
    np.testing.assert_allclose(found, expected(embeddings, vectors, images, captions, weights, temperature), atol=1e-3)


@given(scale=st.floats(1e-20, 1e20), rows=st.integers(1, 5), width=st.integers(1, 8))
def test_vectors_are_kept_to_a_part_in_254_of_their_largest(scale, rows, width):
    values = scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    bank = QueryBank.of((values, values), (values, values))
    allowed = values.abs().amax(dim=1, keepdim=True) / 253.9
    assert (bank.caption_embeddings.dense() - values).abs().le(allowed).all()


def test_a_vector_of_zeros_stays_one():
    bank = QueryBank.of((torch.zeros(2, 3), torch.zeros(2, 0)), (torch.zeros(1, 3), torch.zeros(1, 0)))
    assert not bank.caption_embeddings.dense().any()


def test_what_is_like_nothing_has_the_prior_of_a_tenth():
    bank, weights = a_bank(), ScoreWeights(20.0, pooled=3.0)
    strange = bank.of_images(torch.zeros(1, 24), torch.zeros(1, 5), weights)
    own = bank.of_images(bank.image_embeddings.dense(), bank.image_vectors.dense(), weights)
    assert strange.item() == pytest.approx(own.min().item())
    assert strange.item() == bank.floor(weights, images=True)
    assert bank.floor(weights, images=False) != bank.floor(weights, images=True)
    assert bank.floor(weights._replace(similarity=1.0), images=True) != strange.item()


def test_many_rows_go_in_pieces():
    bank = a_bank()
    embeddings, vectors = unit(2500, 24, 5), unit(2500, 5, 6)
    weights = ScoreWeights(2.0, pooled=3.0)
    whole = bank.of_images(embeddings, vectors, weights)
    apart = torch.cat([bank.of_images(e[None], v[None], weights) for e, v in zip(embeddings, vectors, strict=True)])
    torch.testing.assert_close(whole, apart)


def test_a_bundle_keeps_it(tiny_bundle, tmp_path):
    bundle = replace(with_bank(tiny_bundle), own_caption_weights=ScoreWeights(1.0, 2.0, 3.0, 4.0, 5.0))
    info = bundle.save(tmp_path / "with")
    again = ModelBundle.load(tmp_path / "with")
    assert info.bank == {"captions": 7, "images": 9, "dim": 5}
    assert info.weights == again.weights == bundle.weights == (20.0, 0.0, 3.0, 0.5, 2.0)
    assert info.caption_weights == again.caption_weights == (1.0, 2.0, 3.0, 4.0, 5.0)
    for name, value in bundle.bank.state_dict().items():
        assert torch.equal(value, again.bank.state_dict()[name])
    plain = read_bundle_info(tiny_bundle)
    assert info.encoder_fingerprint == plain.encoder_fingerprint, "an index need not be built again"
    assert (plain.bank, plain.weights, plain.caption_weights) == (None, ScoreWeights(), ScoreWeights())
    assert info.fingerprint != replace(bundle, bank=None).save(tmp_path / "without").fingerprint


def test_priors_of_a_bundle_are_those_of_its_tokens_and_captions(tiny_bundle):
    bundle = replace(
        with_bank(tiny_bundle), own_caption_weights=ScoreWeights(10.0, pooled=6.0, prior=0.25, temperature=3)
    )
    embeddings, tokens = unit(4, 24, 8), torch.randn(4, *bundle.block_shape)
    vectors = bundle.joint.pooled.images(tokens)
    captions = (bundle.bank.caption_embeddings.dense(), bundle.bank.caption_vectors.dense())
    images = (bundle.bank.image_embeddings.dense(), bundle.bank.image_vectors.dense())
    taken = 0.5 * expected(embeddings, vectors, captions, images, (20.0, 3.0), 2.0)
    np.testing.assert_allclose(bundle.image_priors(embeddings.numpy(), tokens), taken, atol=1e-4)
    texts = ["a dog", "two cats", "a dog", "red"]
    taken = 0.25 * expected(embeddings, bundle.joint.caption_vectors(texts), images, captions, (10.0, 6.0), 3.0)
    np.testing.assert_allclose(bundle.caption_priors(embeddings.numpy(), texts), taken, atol=1e-4)
    without = replace(bundle, bank=None)
    assert not without.image_priors(embeddings.numpy(), tokens).any()
    assert not without.caption_priors(embeddings.numpy(), texts).any()


def test_a_bank_of_another_width_is_refused(tiny_bundle, tmp_path):
    bundle = replace(with_bank(tiny_bundle), bank=a_bank(dim=4))
    with pytest.raises(ModelError, match="pooled vectors of width 4, the pooled similarity 5"):
        bundle.save(tmp_path / "never")


@pytest.mark.parametrize(
    "change",
    [
        {"bank": {"captions": 0, "images": 9, "dim": 5}},
        {"bank": {"captions": 7, "images": 9}},
        {"prior_temperature": 0},
        {"prior_weight": float("nan")},
        {"caption_weights": {"similarity": 1.0}},
        {"caption_weights": {**ScoreWeights()._asdict(), "late": float("inf")}},
    ],
)
def test_damaged_numbers_are_refused(tiny_bundle, tmp_path, change):
    with_bank(tiny_bundle).save(tmp_path / "with")
    path = tmp_path / "with" / INFO_FILE
    content = json.loads(path.read_text())
    content["joint"].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="damaged"):
        read_bundle_info(tmp_path / "with")


def test_a_score_in_words():
    assert ScoreWeights().described() == "logit"
    assert ScoreWeights(2.5, 0.0, 3.0).described() == "logit + 3 x pooled similarity + 2.5 x similarity"
    assert ScoreWeights(late=1.0, prior=0.5).described() == "logit + 1 x late interaction - 0.5 x prior"


def test_a_bank_that_is_gone_is_named(tiny_bundle, tmp_path):
    with_bank(tiny_bundle).save(tmp_path / "with")
    (tmp_path / "with" / BANK_WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"lacks {BANK_WEIGHTS}"):
        ModelBundle.load(tmp_path / "with")
