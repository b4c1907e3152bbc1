"""The hubness correction, against NumPy in float64, and its bank in bundles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.errors import ModelError
from edje_index.scoring.parts import HubnessBank
from edje_index.scoring.weights import DirectionWeights, HubnessSimilarity, ScoreWeights
from tests.edje_index.scoring.bundles import bundle_with_all_parts, random_bank, unit


def expected(candidates, others, own, similarity):
    """The definition without care for large exponents; `own` is the bank on the
    side of the candidates.
    """

    def values(side):
        parts = [rows.double().numpy() for rows in (*side, *others)]
        scores = (
            similarity.embedding * parts[0] @ parts[2].T
            + similarity.pooled * parts[1] @ parts[3].T
        )
        return similarity.temperature * np.log(
            np.exp(scores / similarity.temperature).mean(axis=1)
        )

    return np.maximum(values(candidates), np.quantile(values(own), 0.1))


@settings(max_examples=30)
@given(
    weights=st.tuples(st.floats(0, 30), st.floats(0, 30)),
    temperature=st.floats(0.5, 30),
    dim=st.sampled_from([0, 1, 5]),
)
def test_it_is_the_soft_maximum_over_the_bank(weights, temperature, dim):
    bank = random_bank(dim)
    similarity = HubnessSimilarity(*weights, temperature)
    candidates = unit(6, 24, 5), unit(6, dim, 6)
    captions = (bank.caption_embeddings.dense(), bank.caption_vectors.dense())
    images = (bank.image_embeddings.dense(), bank.image_vectors.dense())
    values = bank.hubness(*candidates, similarity, "t2i")
    np.testing.assert_allclose(
        values, expected(candidates, captions, images, similarity), atol=1e-3
    )
    values = bank.hubness(*candidates, similarity, "i2t")
    np.testing.assert_allclose(
        values, expected(candidates, images, captions, similarity), atol=1e-3
    )


@given(scale=st.floats(1e-20, 1e20), rows=st.integers(1, 5), width=st.integers(1, 8))
def test_vectors_are_kept_to_a_part_in_254_of_their_largest(scale, rows, width):
    values = scale * torch.randn(
        rows, width, generator=torch.Generator().manual_seed(0)
    )
    bank = HubnessBank.of((values, values), (values, values))
    allowed = values.abs().amax(dim=1, keepdim=True) / 253.9
    assert (bank.caption_embeddings.dense() - values).abs().le(allowed).all()


def test_parts_that_do_not_fit_are_refused(tiny_bundle, tmp_path):
    bundle = bundle_with_all_parts(tiny_bundle)
    with pytest.raises(ModelError, match="the bundle has no hubness correction"):
        replace(bundle, hubness_bank=None).save(tmp_path / "never")
    plain = replace(
        bundle,
        hubness_bank=None,
        pooled=None,
        score=DirectionWeights(i2t=ScoreWeights(pooled=1.0)),
    )
    with pytest.raises(ModelError, match="the bundle has no pooled similarity"):
        plain.save(tmp_path / "never")
    with pytest.raises(
        ModelError, match="vectors of width 4, but the pooled similarity has width 5"
    ):
        replace(bundle, hubness_bank=random_bank(dim=4)).save(tmp_path / "never")
