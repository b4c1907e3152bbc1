"""Bundles whose ``bundle.json`` has format version 1, as release 0.1 wrote it."""

from __future__ import annotations

import json
import shutil

import torch

from edje_index.bundles import info as bundle_info
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import INFO_FILE, read_bundle_info
from edje_index.scoring.weights import ScoreWeights
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1" / "model"


def test_a_bundle_that_is_saved_again_keeps_everything(tmp_path):
    old = ModelBundle.load(GOLDEN)
    info = old.save(tmp_path / "again")
    new = ModelBundle.load(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / INFO_FILE).read_text())["format_version"] == 2
    )
    assert new.score == old.score
    assert info.encoder_fingerprint == old.info.encoder_fingerprint
    files = read_bundle_info(GOLDEN).files
    assert {name for name in files if info.files.get(name) != files[name]} <= {
        "joint/config.json",
        "bank.safetensors",
    }
    configs = [
        json.loads((folder / "joint" / "config.json").read_text())
        for folder in (GOLDEN, tmp_path / "again")
    ]
    # that of the library that saved it
    assert all(config.pop("transformers_version") for config in configs)
    assert configs[0] == configs[1]
    states = [bundle.pooled.state_dict() for bundle in (old, new)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_weights_that_are_left_out(tmp_path):
    """Parts that the bundle does not hold have no weight."""
    for number, (weights, expected) in enumerate(
        (
            ({}, ScoreWeights()),
            (
                {"late_weight": 1.0, "pooled_weight": 2.0, "prior_weight": 3.0},
                ScoreWeights(late=1.0),
            ),
        )
    ):
        folder = shutil.copytree(GOLDEN, tmp_path / str(number))
        content = json.loads((GOLDEN / INFO_FILE).read_text())
        content["joint"] = {"text_embed_dim": 24, **weights}
        content["fingerprint"] = bundle_info._stored_fingerprint(content)
        (folder / INFO_FILE).write_text(json.dumps(content))
        info = read_bundle_info(folder)
        assert info.joint == {"text_embed_dim": 24}
        assert info.score.t2i == info.score.i2t == expected
