"""Ranks and recall against an independent count in plain Python, and intervals
against SciPy's bootstrap.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from edje_index.evaluation.evaluate import evaluate
from edje_index.evaluation.pools import split_set
from edje_index.evaluation.recall import (
    ClusterBootstrap,
    embedding_pools,
    hits,
    nearest,
    ranks_after_reranking,
    ranks_by_similarity,
)
from storage_formats.errors import UsageError

# so few values that ties are everywhere
FEW = st.integers(-2, 2)


@st.composite
def searches(draw):
    """Similarities and scores [q, c] as lists, labels of queries and candidates, a
    pool.
    """
    queries = draw(st.integers(1, 4))
    candidates = draw(st.integers(1, 7))
    row = st.lists(FEW, min_size=candidates, max_size=candidates)
    table = st.lists(row, min_size=queries, max_size=queries)
    labels = draw(st.lists(st.integers(0, 3), min_size=candidates, max_size=candidates))
    asked = draw(st.lists(st.integers(0, 3), min_size=queries, max_size=queries))
    return draw(table), draw(table), asked, labels, draw(st.integers(1, 9))


def by_hand(similarities, scores, label, labels, pool):
    """Candidates best first: the pool by score, the rest by similarity; then the
    place of the first right one.
    """
    order = sorted(range(len(labels)), key=lambda place: (-similarities[place], place))
    # stable
    head = sorted(order[:pool], key=lambda place: -scores[place])
    right = [
        at for at, place in enumerate([*head, *order[pool:]]) if labels[place] == label
    ]
    return order, (right or [len(labels)])[0]


@given(searches())
def test_ranks_equal_those_of_plain_sorting(search):
    similarities, scores, asked, labels, pool = search
    similarity = np.array(similarities, dtype=np.float32)
    relevant = np.array(asked)[:, None] == np.array(labels)
    plain = ranks_by_similarity(similarity, relevant)
    assert hits(plain, (1, 3)).tolist() == [[rank < 1, rank < 3] for rank in plain]
    kept = nearest(similarity, pool)
    score, right = (
        np.take_along_axis(np.array(values), kept, axis=1)
        for values in (scores, relevant)
    )
    reranked = ranks_after_reranking(score.astype(np.float32), right, pool, plain)
    for query, label in enumerate(asked):
        near = similarities[query]
        order, rank = by_hand(near, near, label, labels, pool)
        assert kept[query].tolist() == order[:pool]
        assert plain[query] == rank
        _, rank = by_hand(near, scores[query], label, labels, pool)
        assert reranked[query] == rank


def test_pools_do_not_depend_on_how_queries_are_cut(monkeypatch):
    rng = np.random.default_rng(0)
    # Small integers: their products are exact, whatever the matrix product's order.
    queries = rng.integers(-3, 4, (23, 5)).astype(np.float32)
    candidates = rng.integers(-3, 4, (11, 5)).astype(np.float32)
    labels = rng.integers(0, 4, 11).tolist()
    wanted = rng.integers(0, 5, 23)
    monkeypatch.setattr("edje_index.evaluation.recall._CHUNK_NUMBERS", 30)
    pools = embedding_pools(queries, candidates, wanted, np.array(labels), 6)
    for query, similarities in enumerate((queries @ candidates.T).tolist()):
        order, rank = by_hand(similarities, similarities, wanted[query], labels, 6)
        best = order[:6]
        assert pools.candidates[query].tolist() == best
        assert pools.similarities[query].tolist() == [similarities[at] for at in best]
        right = [labels[at] == wanted[query] for at in best]
        assert pools.relevant[query].tolist() == right
        assert pools.ranks[query] == rank


RNG = np.random.default_rng(5)
CLUSTERS = RNG.integers(0, 40, 150) * 7
HITS = (RNG.random((150, 3)) < [0.2, 0.5, 0.55]).astype(float)


def test_intervals_are_those_of_scipy_on_the_same_draws():
    """SciPy resamples the ratio of two sums over clusters, which is the mean over
    their members.
    """
    labels = np.unique(CLUSTERS)
    counts = np.array([(label == CLUSTERS).sum() for label in labels])
    for column, estimate in enumerate(
        ClusterBootstrap(CLUSTERS, 500, 3).estimates(HITS)
    ):
        sums = np.array([HITS[label == CLUSTERS, column].sum() for label in labels])
        interval = stats.bootstrap(
            (sums, counts),
            lambda left, right, axis=-1: left.sum(axis=axis) / right.sum(axis=axis),
            n_resamples=500,
            paired=True,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(3),
        ).confidence_interval
        assert estimate.value == pytest.approx(HITS[:, column].mean())
        assert (estimate.low, estimate.high) == pytest.approx(
            (interval.low, interval.high)
        )
    assert ClusterBootstrap(CLUSTERS, 0).estimates(HITS)[0].low is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"queries": 0},
        {"pools": 5},
        {"pools": ("5",)},
        {"pools": (1.5,)},
        {"precisions": "bf16"},
        {"resamples": -1},
        {"seed": -1},
        {"captions": ["a.jsonl"]},
    ],
)
def test_an_invalid_argument_is_named(wrong):
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))} must be"):
        evaluate("none.edje", **wrong)


def test_fewer_queries_are_drawn_from_all():
    every = split_set([["a"]] * 1000, np.arange(1000))
    few = every.subsampled(10, 0)
    more = every.subsampled(20, 0)
    for name in ("query_captions", "query_rows"):
        drawn = set(getattr(few, name))
        assert len(drawn) == 10
        assert max(drawn) > 500
        assert drawn < set(getattr(more, name))
