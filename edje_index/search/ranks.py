"""What re-ranking changed: the rank of each hit by embedding beside its rank by the final score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edje_index.search.hits import Hit


@dataclass(frozen=True)
class RankedHit:
    """A hit and its two ranks among the candidates, counted from 1.

    Attributes:
        hit: the hit.
        rank: its rank by the final score.
        embedding_rank: its rank by the similarity of the embeddings.
    """

    hit: Hit
    rank: int
    embedding_rank: int

    @property
    def moved(self) -> int:
        """By how many ranks re-ranking moved the hit: positive for up, negative for down."""
        return self.embedding_rank - self.rank


def rank_hits(hits: Sequence[Hit]) -> list[RankedHit]:
    """The hits of a whole pool, best first, with both ranks. Equal similarities are ranked by row id."""
    by_embedding = sorted(hits, key=lambda hit: (-hit.embedding_score, hit.row_id))
    embedding_ranks = {hit.row_id: rank for rank, hit in enumerate(by_embedding, 1)}
    return [RankedHit(hit, rank, embedding_ranks[hit.row_id]) for rank, hit in enumerate(hits, 1)]


def embedding_order(ranked: Sequence[RankedHit]) -> list[RankedHit]:
    """`ranked` in the order of the embeddings."""
    return sorted(ranked, key=lambda hit: hit.embedding_rank)
