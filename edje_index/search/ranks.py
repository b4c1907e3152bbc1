"""Compares the rank of each hit before and after re-ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edje_index.search.hits import Hit


@dataclass(frozen=True)
class RankedHit:
    """A hit and its rank among the candidates before and after re-ranking. The first rank is 1.

    Attributes:
        hit: the hit.
        rank: rank by the final score.
        embedding_rank: rank by embedding similarity.
    """

    hit: Hit
    rank: int
    embedding_rank: int

    @property
    def moved(self) -> int:
        """Number of ranks by which re-ranking raised the hit; negative if re-ranking lowered the hit."""
        return self.embedding_rank - self.rank


def rank_hits(hits: Sequence[Hit]) -> list[RankedHit]:
    """Return each hit with its two ranks.

    Hits of equal embedding similarity are ranked by row id.

    Args:
        hits: all candidates of a search, best final score first.
    """
    by_embedding = sorted(hits, key=lambda hit: (-hit.embedding_score, hit.row_id))
    embedding_ranks = {hit.row_id: rank for rank, hit in enumerate(by_embedding, 1)}
    return [RankedHit(hit, rank, embedding_ranks[hit.row_id]) for rank, hit in enumerate(hits, 1)]


def embedding_order(ranked: Sequence[RankedHit]) -> list[RankedHit]:
    """Return `ranked` sorted by embedding rank."""
    return sorted(ranked, key=lambda hit: hit.embedding_rank)
