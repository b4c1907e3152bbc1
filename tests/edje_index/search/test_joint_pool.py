"""Searches in which the joint encoder scores some of the candidates, against the parts of a full search."""

from __future__ import annotations

import numpy as np
import pytest

from edje_index.models.joint_scorer import JointScorer
from edje_index.search.token_index import TokenIndex
from storage_formats import UsageError
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
TEXTS = ["a dog plays in the snow", "two red boats", "a child on a long beach near the sea", "two red boats"]
POOL = 9
SCORE = "logit=3,late=1,pooled=2,embedding=5,hubness=0.5"


@pytest.fixture(scope="module")
def index() -> TokenIndex:
    return TokenIndex.open(GOLDEN / "index", GOLDEN / "model", score=SCORE)


def by_hand(index: TokenIndex, hits, joint_pool: int) -> list[tuple[int, float]]:
    """(row id, final score), best first, from the hits of a full search."""
    weights = index.model.weights("t2i", SCORE).by_part()
    cheap = {
        hit.row_id: sum(weights[part] * value for part, value in hit.parts.items() if part != "logit") for hit in hits
    }
    logits = {hit.row_id: weights["logit"] * hit.parts["logit"] for hit in hits}
    chosen = sorted(cheap, key=lambda row: -cheap[row])[:joint_pool]
    lowest = min(logits[row] for row in chosen)
    final = {row: cheap[row] + (logits[row] if row in chosen else lowest) for row in cheap}
    return sorted(final.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("joint_pool", [1, 4, POOL])
def test_the_scores_are_those_of_the_parts(index, joint_pool, monkeypatch):
    pairs, logits = [], JointScorer.logits
    full = index.search(TEXTS, POOL, POOL)

    def record(self, inputs, tokens):
        pairs.append(len(tokens))
        return logits(self, inputs, tokens)

    monkeypatch.setattr(JointScorer, "logits", record)
    results = index.search(TEXTS, POOL, POOL, joint_pool=joint_pool)
    assert sum(pairs) == joint_pool * len(TEXTS)
    for hits, exact in zip(results, full, strict=True):
        expected = by_hand(index, exact, joint_pool)
        assert [hit.row_id for hit in hits] == [row for row, _ in expected]
        np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected], atol=1e-4)
        assert ["logit" in hit.parts for hit in hits] == [rank < joint_pool for rank in range(POOL)]
    changed = any([hit.row_id for hit in a] != [hit.row_id for hit in b] for a, b in zip(results, full, strict=True))
    assert changed == (joint_pool < POOL), "a joint pool changes some order, and the whole pool none"


def test_one_text_gives_the_hits_of_several(index):
    together = index.search(TEXTS, 6, POOL, joint_pool=3)
    alone = [index.search(text, 6, POOL, joint_pool=3) for text in TEXTS]
    assert [[hit.row_id for hit in hits] for hits in together] == [[hit.row_id for hit in hits] for hits in alone]
    for left, right in zip(together, alone, strict=True):
        np.testing.assert_allclose([hit.score for hit in left], [hit.score for hit in right], atol=1e-4, rtol=0)


def test_a_joint_pool_above_the_pool_scores_all(index):
    assert index.search(TEXTS, 6, POOL, joint_pool=1000) == index.search(TEXTS, 6, POOL)


def test_nothing_passes_the_filter_of_one_search(index):
    assert index.search(TEXTS, 6, POOL, joint_pool=3, where="row_id < 0") == [[], [], [], []]


def test_a_joint_pool_without_use_is_refused(index):
    for score, joint_pool in (("logit", 3), ("late", 3), ("bundle", 0)):
        with pytest.raises(UsageError, match="joint_pool"):
            index.search("a dog", score=score, joint_pool=joint_pool)
    with pytest.raises(TypeError, match="joint_pools"):
        index.search("a dog", joint_pools=3)


@pytest.mark.parametrize("option", [{"joint_pool": 3}, {"score": "logit"}])
def test_an_option_of_re_ranking_without_re_ranking_is_refused(index, option):
    with pytest.raises(UsageError, match="no effect without re-ranking"):
        index.search("a dog", 3, POOL, rerank=False, **option)
