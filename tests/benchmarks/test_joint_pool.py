"""The comparison of joint pools, against searches with them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kendalltau

from benchmarks.joint_pool import Query, agreement, full_searches, ranking, times
from edje_index.scoring.final_score import FinalScore
from edje_index.search.token_index import TokenIndex
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
QUERIES = [Query("a dog plays in the snow", 3), Query("two red boats", 999)]


@pytest.fixture(scope="module")
def index() -> TokenIndex:
    return TokenIndex.open(GOLDEN / "index", GOLDEN / "model", score="logit=3,late=1,pooled=2,embedding=5,hubness=0.5")


@pytest.mark.parametrize("joint_pool", [None, 3])
def test_a_ranking_is_that_of_a_search(index, joint_pool):
    score = FinalScore.of(index.model.weights("t2i", index._score))
    for query, hits in zip(QUERIES, full_searches(index, QUERIES, 9), strict=True):
        expected = index.search(query.text, 9, 9, joint_pool=joint_pool)
        assert ranking(hits, score, joint_pool).tolist() == [hit.row_id for hit in expected]
    assert times(index, QUERIES, 9, joint_pool)["cpu_ms"] > 0


def test_agreement_counts_ranks():
    orders = [np.array([3, 1, 2, 0]), np.array([5, 6, 7, 8])]
    expected = [np.array([3, 2, 1, 0]), np.array([5, 6, 7, 8])]
    figures = agreement(orders, expected, QUERIES)
    tau = kendalltau([0, 1, 2, 3], [0, 2, 1, 3]).statistic
    assert figures["lowest_tau"] == pytest.approx(tau)
    assert figures["mean_tau"] == pytest.approx((tau + 1) / 2)
    assert (figures["same_1"], figures["same_10"], figures["recall_1"]) == (100, 100, 50)
