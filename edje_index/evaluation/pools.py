"""Ranking by embedding: the pool of each query, exactly (no approximate index), some queries at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edje_index.evaluation.recall import Bools, Floats, Ints, nearest, ranks_by_similarity

_CHUNK_NUMBERS = 1 << 24  # similarities that are held at a time


@dataclass(frozen=True)
class Pools:
    """The p nearest candidates of q queries, best first.

    Attributes:
        candidates: int64 [q, p], places among the candidates.
        similarities: float32 [q, p].
        relevant: bool [q, p].
        ranks: int64 [q], rank of the best relevant one among all candidates.
    """

    candidates: Ints
    similarities: Floats
    relevant: Bools
    ranks: Ints


def embedding_pools(
    queries: Floats, candidates: Floats, query_labels: Ints, candidate_labels: Ints, pool: int
) -> Pools:
    """Pools of queries [q, e] among candidates [c, e]; a candidate is relevant where its label is the query's."""
    chunk = max(1, _CHUNK_NUMBERS // len(candidates))
    parts = [
        _pools(queries[at : at + chunk] @ candidates.T, query_labels[at : at + chunk], candidate_labels, pool)
        for at in range(0, len(queries), chunk)
    ]
    return Pools(
        candidates=np.concatenate([part.candidates for part in parts]),
        similarities=np.concatenate([part.similarities for part in parts]),
        relevant=np.concatenate([part.relevant for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )


def _pools(similarities: Floats, query_labels: Ints, candidate_labels: Ints, pool: int) -> Pools:
    kept = nearest(similarities, pool)
    relevant = query_labels[:, None] == candidate_labels
    return Pools(
        candidates=kept,
        similarities=np.take_along_axis(similarities, kept, axis=1),
        relevant=np.take_along_axis(relevant, kept, axis=1),
        ranks=ranks_by_similarity(similarities, relevant),
    )
