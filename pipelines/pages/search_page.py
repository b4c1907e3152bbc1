"""The HTML page of a search, which shows the hits before and after re-ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from edje_index.images.thumbnails import Thumbnail, read_thumbnails
from edje_index.scoring.weights import PART_NAMES, ScoreWeights
from edje_index.search.hits import RankedHit, embedding_order, rank_hits
from pipelines.pages.rendering import render

if TYPE_CHECKING:
    from edje_index.search.hits import Hit

MAX_SHOWN = 100
"""Maximum number of hits that a page shows before and after re-ranking. The page contains a thumbnail of each hit."""


@dataclass(frozen=True)
class SearchContext:
    """What the page of a search shows besides the hits.

    Attributes:
        root: directory of the index.
        query: text of the query.
        precision: precision of the tokens.
        weights: weights of the final score.
        trained: False if the model has random weights.
        timings: seconds by stage.
    """

    root: Path
    query: str
    precision: str
    weights: ScoreWeights
    trained: bool
    timings: Mapping[str, float]


@dataclass(frozen=True)
class _Page:
    index: str
    query: str
    precision: str
    trained: bool
    pool: int
    summary: str
    by_embedding: Sequence[RankedHit]
    by_score: Sequence[RankedHit]
    thumbnails: Mapping[int, Thumbnail]
    names: Mapping[int, str]
    weights: Mapping[str, float]
    part_names: Mapping[str, str]
    formula: str
    timings: Mapping[str, float]


def search_page(pool: Sequence[Hit], k: int, context: SearchContext) -> str:
    """Return the HTML page of a search.

    Args:
        pool: every candidate of the search, best first.
        k: number of hits to show before and after re-ranking, at most `MAX_SHOWN`.
        context: what the page shows besides the hits.
    """
    ranked = rank_hits(pool)
    shown = min(k, MAX_SHOWN)
    by_score, by_embedding = ranked[:shown], embedding_order(ranked)[:shown]
    row_ids = sorted({hit.hit.row_id for hit in [*by_score, *by_embedding]})
    page = _Page(
        index=str(context.root),
        query=context.query,
        precision=context.precision,
        trained=context.trained,
        pool=len(pool),
        summary=movement_summary(by_score, by_embedding),
        by_embedding=by_embedding,
        by_score=by_score,
        thumbnails={thumbnail.row_id: thumbnail for thumbnail in read_thumbnails(context.root, row_ids)},
        names={hit.hit.row_id: short_name(hit.hit.uri) for hit in ranked},
        weights=context.weights.by_part(),
        part_names=PART_NAMES,
        formula=context.weights.described(),
        timings=context.timings,
    )
    return render("search.html", page=page)


def movement_summary(by_score: Sequence[RankedHit], by_embedding: Sequence[RankedHit]) -> str:
    """Return one or two sentences on how re-ranking changed the order of the shown hits."""
    if not by_score:
        return "There are no hits."
    before = {ranked.hit.row_id for ranked in by_embedding}
    entered = sum(ranked.hit.row_id not in before for ranked in by_score)
    stayed = sum(ranked.moved == 0 for ranked in by_score)
    climbed = max(by_score, key=lambda ranked: ranked.moved)
    text = f"Of the first {len(by_score)}, {stayed} kept their rank and {entered} came from further down."
    if climbed.moved > 0:
        name = short_name(climbed.hit.uri)
        text += f" The largest rise is that of {name}: from {climbed.embedding_rank} to {climbed.rank}."
    return text


def short_name(uri: str) -> str:
    """Return the last part of a path, or the name of an archive member."""
    return PurePath(uri.rpartition("!")[2]).name or uri
