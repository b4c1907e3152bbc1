from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.late_interaction import late_interaction
from edje_index.training.model.losses import alignment_scores


def test_pairs_score_as_in_the_alignment_phase():
    """The training loss, which has an oracle of its own, is the reference."""
    generator = torch.Generator().manual_seed(0)
    words, tokens = torch.randn(30, 8, generator=generator), torch.randn(4, 5, 8, generator=generator)
    captions = [[1, 2, 2, 29], [7], [8, 9, 3], []]
    content = np.arange(30) != 3
    mean = words.mean(dim=0)
    shares = torch.zeros(30, 4)
    for at, caption in enumerate(captions):
        kept = [word for word in caption if content[word]]
        for word in kept:
            shares[word, at] += 1 / len(kept)
    expected = alignment_scores(tokens - mean, words - mean, shares).diagonal()
    torch.testing.assert_close(late_interaction(captions, tokens, words, content), expected)
    assert expected[3] == 0


@pytest.mark.parametrize("captions", [[[]], [[3], []]])
def test_captions_without_any_word_score_nothing(captions):
    tokens, words, content = torch.ones(len(captions), 2, 8), torch.randn(5, 8), np.arange(5) != 3
    assert late_interaction(captions, tokens, words, content).tolist() == [0.0] * len(captions)


@pytest.fixture
def bundle(tiny_bundle):
    return ModelBundle.load(tiny_bundle)


def test_it_is_added_to_the_logit_with_its_weight(bundle):
    captions = ["a dog", "two cats and a house", "of the"]
    tokens = torch.randn(3, *bundle.block_shape)
    logits = bundle.joint.score(captions, tokens)
    late = bundle.joint.late_interaction(captions, tokens)
    assert late[:2].abs().min() > 0
    bundle.joint.late_weight = 5.0
    torch.testing.assert_close(bundle.joint.score(captions, tokens), logits + 5 * late)
    torch.testing.assert_close(
        bundle.joint.score("a dog", tokens), bundle.joint.score(["a dog"] * 3, tokens), atol=1e-5, rtol=0
    )


def test_a_bundle_keeps_the_weight(bundle, tmp_path):
    without = replace(bundle, info=None).save(tmp_path / "without")
    assert "late_weight" not in without.joint
    bundle.joint.late_weight = 2.5
    info = replace(bundle, info=None).save(tmp_path / "with")
    assert info.fingerprint != without.fingerprint
    assert info.encoder_fingerprint == without.encoder_fingerprint
    assert ModelBundle.load(tmp_path / "with").joint.late_weight == 2.5
