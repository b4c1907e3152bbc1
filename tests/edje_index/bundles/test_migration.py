"""Bundles whose ``bundle.json`` has format version 1."""

from __future__ import annotations

import json

import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import INFO_FILE, read_bundle_info
from edje_index.bundles.migration import migrate_version_1
from edje_index.scoring.weights import DirectionWeights, HubnessSimilarity, ScoreWeights
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1" / "model"
SHIPPED = REPO / "models" / "flickr8k-dinov2-small" / "bundle"
SIZES = {"text_embed_dim": 24, "pooled": {"words": 40, "dim": 6}, "bank": {"captions": 9, "images": 7, "dim": 6}}


def test_the_golden_bundle():
    info = read_bundle_info(GOLDEN)
    assert info.score == DirectionWeights(
        t2i=ScoreWeights(1.0, 0.75, 0.5, 1.5, 0.4, HubnessSimilarity(1.5, 0.5, 0.2)),
        i2t=ScoreWeights(1.0, 0.25, 0.9, 2.0, 0.6, HubnessSimilarity(2.0, 0.9, 0.3)),
    )
    assert info.pooled_similarity == {"words": 40, "dim": 6}
    assert info.hubness_bank == {"captions": 9, "images": 7, "dim": 6}
    assert info.fingerprint == json.loads((GOLDEN / INFO_FILE).read_text())["fingerprint"]


def test_the_shipped_model():
    stored = json.loads((SHIPPED / INFO_FILE).read_text())
    info, joint = read_bundle_info(SHIPPED), stored["joint"]
    assert (info.fingerprint, info.encoder_fingerprint) == (stored["fingerprint"], stored["encoder_fingerprint"])
    similarity = HubnessSimilarity(joint["embedding_weight"], joint["pooled_weight"], joint["prior_temperature"])
    weights = (joint[f"{name}_weight"] for name in ("late", "pooled", "embedding", "prior"))
    assert info.score.t2i == ScoreWeights(1.0, *weights, similarity)
    other = joint["caption_weights"]
    similarity = HubnessSimilarity(other["similarity"], other["pooled"], other["temperature"])
    weights = (other[name] for name in ("late", "pooled", "similarity", "prior"))
    assert info.score.i2t == ScoreWeights(1.0, *weights, similarity)


def test_a_bundle_that_is_saved_again_keeps_everything(tmp_path):
    old = ModelBundle.load(GOLDEN)
    info = old.save(tmp_path / "again")
    new = ModelBundle.load(tmp_path / "again")
    assert json.loads((tmp_path / "again" / INFO_FILE).read_text())["format_version"] == 2
    assert new.score == old.score
    assert info.encoder_fingerprint == old.encoder_fingerprint
    assert {name: file["sha256"] for name, file in info.files.items()} == {
        name: file["sha256"] for name, file in read_bundle_info(GOLDEN).files.items()
    }
    for part in ("pooled", "hubness_bank"):
        states = [getattr(bundle, part).state_dict() for bundle in (old, new)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_weights_that_are_left_out():
    joint, score = migrate_version_1({"text_embed_dim": 24})
    assert (joint, score) == ({"text_embed_dim": 24}, DirectionWeights())
    score = migrate_version_1({**SIZES, "embedding_weight": 2.0})[1]
    assert score.t2i == score.i2t == ScoreWeights(embedding=2.0, hubness_similarity=HubnessSimilarity(2.0, 0.0, 1.0))


def test_a_part_that_the_bundle_does_not_hold_has_no_weight():
    named = {"late_weight": 1.0, "pooled_weight": 2.0, "prior_weight": 3.0}
    score = migrate_version_1({"text_embed_dim": 24, **named})[1]
    assert score.t2i.by_part() == {"logit": 1, "late": 1, "pooled": 0, "embedding": 0, "hubness": 0}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prior_temperature": 0}, ValueError),
        ({"prior_weight": float("nan")}, ValueError),
        ({"caption_weights": {"similarity": 1.0}}, KeyError),
        ({"late_weight": None}, TypeError),
    ],
)
def test_damage_is_refused(change, error):
    with pytest.raises(error):
        migrate_version_1({**SIZES, **change})
