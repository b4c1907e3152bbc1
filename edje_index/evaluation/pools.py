"""Finds the pools of many queries by an exact search over the embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edje_index.evaluation.recall import Bools, Floats, Ints, nearest, ranks_by_similarity

_CHUNK_NUMBERS = 1 << 24  # similarities in memory at a time


@dataclass(frozen=True)
class Pools:
    """The p nearest candidates of each of q queries, nearest first.

    Attributes:
        candidates: index of each pool entry among all candidates, int64 [q, p].
        similarities: cosine similarity of each pool entry to the query, float32 [q, p].
        relevant: which pool entries are relevant to the query, bool [q, p].
        ranks: rank of the most similar relevant candidate of each query among all candidates, counted from 0,
            int64 [q].
    """

    candidates: Ints
    similarities: Floats
    relevant: Bools
    ranks: Ints


def embedding_pools(
    queries: Floats, candidates: Floats, query_labels: Ints, candidate_labels: Ints, pool: int
) -> Pools:
    """Return the pools of `queries` [q, e] among `candidates` [c, e].

    A candidate is relevant to a query if both have the same label. `pool` is the number of candidates per query.
    """
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
