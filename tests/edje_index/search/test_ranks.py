"""Ranks before and after re-ranking, and the hits in a notebook."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edje_index import Hit, Hits
from edje_index.search.ranks import embedding_order, rank_hits


def hit(row_id: int, score: float, embedding_score: float, uri: str = "/a.jpg") -> Hit:
    return Hit(row_id, uri, score, embedding_score, None, {})


def test_ranks_of_three_hits():
    ranked = rank_hits([hit(7, 3.0, 0.1), hit(8, 2.0, 0.3), hit(9, 1.0, 0.2)])
    assert [(item.rank, item.embedding_rank, item.moved) for item in ranked] == [(1, 3, 2), (2, 1, -1), (3, 2, -1)]
    assert [item.hit.row_id for item in embedding_order(ranked)] == [8, 9, 7]


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30))
def test_movements_add_up_to_zero_and_ranks_agree_with_numpy(similarities):
    ranked = rank_hits([hit(row, -row, value) for row, value in enumerate(similarities)])
    assert sum(item.moved for item in ranked) == 0
    order = np.argsort(-np.array(similarities), kind="stable")
    assert [item.hit.row_id for item in embedding_order(ranked)] == order.tolist()


def test_a_notebook_escapes_names_and_survives_a_lost_index():
    hits = Hits([hit(0, 1.0, 0.5, "<script>alert(1)</script>")], Path("/nowhere"))
    html = hits._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "no image" in html
    assert hits == [hit(0, 1.0, 0.5, "<script>alert(1)</script>")]


def test_a_notebook_shows_a_limited_number_of_hits():
    html = Hits([hit(row, 1.0, 0.5) for row in range(60)], Path("/nowhere"))._repr_html_()
    assert html.count("<tr>") == 51
    assert "and 10 more" in html
