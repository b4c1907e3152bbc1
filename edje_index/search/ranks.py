"""Compares the rank of each hit by embedding similarity with its rank by the final score."""

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
        rank: rank of the hit by the final score.
        embedding_rank: rank of the hit by embedding similarity.
    """

    hit: Hit
    rank: int
    embedding_rank: int

    @property
    def moved(self) -> int:
        """Number of ranks that re-ranking moved the hit up; negative if it moved the hit down."""
        return self.embedding_rank - self.rank


def rank_hits(hits: Sequence[Hit]) -> list[RankedHit]:
    """Return the hits of a whole pool with both ranks.

    Hits of equal embedding similarity are ranked by row id.

    Args:
        hits: hits of the whole pool, best final score first.
    """
    by_embedding = sorted(hits, key=lambda hit: (-hit.embedding_score, hit.row_id))
    embedding_ranks = {hit.row_id: rank for rank, hit in enumerate(by_embedding, 1)}
    return [RankedHit(hit, rank, embedding_ranks[hit.row_id]) for rank, hit in enumerate(hits, 1)]


def embedding_order(ranked: Sequence[RankedHit]) -> list[RankedHit]:
    """Return `ranked`, sorted by embedding rank."""
    return sorted(ranked, key=lambda hit: hit.embedding_rank)
