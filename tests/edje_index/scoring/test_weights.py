"""Weights of the final score: their JSON, their spelling on the command line, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from edje_index.errors import ModelError
from edje_index.scoring.weights import (
    PART_NAMES,
    DirectionWeights,
    HubnessSimilarity,
    ScoreWeights,
    check_parts,
    parse_score,
)
from storage_formats import UsageError
from tests.edje_index.scoring.bundles import WEIGHTS


def test_the_default_is_the_published_score():
    assert ScoreWeights().by_part() == {"logit": 1, "late": 0, "pooled": 0, "embedding": 0, "hubness": 0}
    assert DirectionWeights().of("t2i") == DirectionWeights().of("i2t") == ScoreWeights()


def test_weights_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        WEIGHTS.t2i.late = 1.0


def test_json_round_trip():
    assert DirectionWeights.from_json(json.loads(json.dumps(WEIGHTS.to_json()))) == WEIGHTS


@pytest.mark.parametrize("name", [*PART_NAMES, "hubness_similarity"])
def test_json_with_a_missing_weight_is_refused(name):
    value = WEIGHTS.t2i.to_json()
    del value[name]
    with pytest.raises(KeyError):
        ScoreWeights.from_json(value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_are_finite(bad):
    for part in PART_NAMES:
        with pytest.raises(ValueError, match=f"'{part}'"):
            ScoreWeights(**{part: bad})
    with pytest.raises(ValueError, match="'pooled'"):
        HubnessSimilarity(pooled=bad)
    with pytest.raises(ValueError, match="temperature of the hubness correction must be positive, got 0"):
        HubnessSimilarity(temperature=0)


def test_a_score_in_words():
    assert ScoreWeights().described() == "logit"
    assert ScoreWeights(late=0.5, embedding=2.5).described() == (
        "logit + 0.5 x late interaction + 2.5 x embedding similarity"
    )
    assert ScoreWeights(logit=2, hubness=0.5).described() == "2 x logit + 0.5 x hubness correction"


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("logit", {"logit": 1}),
        ("embedding", {"embedding": 1}),
        ("late=2.5", {"late": 2.5}),
        ("logit=1, embedding = 20 ,hubness=0.5", {"logit": 1, "embedding": 20, "hubness": 0.5}),
        ("pooled=-1", {"pooled": -1}),
    ],
)
def test_parts_that_are_not_named_have_no_weight(score, expected):
    weights = parse_score(score, WEIGHTS.t2i)
    assert weights.by_part() == {**dict.fromkeys(PART_NAMES, 0), **expected}
    assert weights.hubness_similarity == WEIGHTS.t2i.hubness_similarity, "the bundle defines the correction"


def test_the_score_of_the_bundle():
    assert parse_score("bundle", WEIGHTS.i2t) == WEIGHTS.i2t
    assert parse_score(WEIGHTS.t2i, WEIGHTS.i2t) == WEIGHTS.t2i


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("", "unknown part ''"),
        ("logits", "unknown part 'logits'"),
        ("logit,bundle", "unknown part 'bundle'"),
        ("logit=", "weight of 'logit' must be a number from -1e30 to 1e30, got ''"),
        ("late=much", "weight of 'late' must be a number from -1e30 to 1e30, got 'much'"),
        ("late=nan", "weight of 'late' must be a number from -1e30 to 1e30, got 'nan'"),
        ("late=1e39", "weight of 'late' must be a number from -1e30 to 1e30, got '1e39'"),
        ("late=0,logit=0", "gives every part the weight 0"),
    ],
)
def test_other_spellings_are_refused(score, words):
    with pytest.raises(UsageError, match=words):
        parse_score(score, WEIGHTS.t2i)


def test_missing_parts_are_named():
    check_parts(ScoreWeights(), {"logit": None}, "the bundle")
    with pytest.raises(
        ModelError, match="the bundle has no pooled similarity and no hubness correction: use only the parts"
    ):
        check_parts(ScoreWeights(pooled=1, hubness=1), {"logit": None, "late": None}, "the bundle")
