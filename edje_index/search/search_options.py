"""Optional arguments of a text search."""

from __future__ import annotations

from typing import TypedDict

from edje_index.scoring.weights import ScoreWeights


class SearchOptions(TypedDict, total=False):
    """How a text search chooses and sorts its candidates.

    Attributes:
        rerank: False sorts the hits by embedding similarity only. The default is True.
        score: final score to sort by, see `TokenIndex.open`. The default, None, selects the score that was given to
            `open`.
        where: filter such as "width > 800 and licence = 'cc0'", see `edje_index.search.where`. The candidates are
            exactly the nearest rows that pass the filter. The default, None, lets all rows pass.
        joint_pool: number of candidates per query that the joint encoder scores. The other parts of the score choose
            these candidates. They rank above all other candidates, see `edje_index.scoring.cascade`. A small number
            makes a search faster, but may change the order of the hits. The default, None, scores all candidates.
    """

    rerank: bool
    score: str | ScoreWeights | None
    where: str | None
    joint_pool: int | None


class ServiceSearchOptions(TypedDict, total=False):
    """How a search of the service chooses and sorts its candidates.

    Attributes:
        rerank, where, joint_pool: see `SearchOptions`.
        precision: precision of the tokens to re-rank with. The default, None, selects the first precision of the index.
    """

    rerank: bool
    where: str | None
    joint_pool: int | None
    precision: str | None
