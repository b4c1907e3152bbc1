"""The results of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edje_index.search.reranking import Candidates, CandidateScores
from storage_formats.format.rows import read_rows


@dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        row_id: row id of the image.
        uri: where the image came from.
        score: the final score, which hits are sorted by; the embedding similarity without re-ranking.
        embedding_score: cosine similarity of the query's embedding and the image's.
        joint_score: logit, late interaction and pooled similarity, weighted and summed as in `score`. None if the score
            has none of them.
        parts: the parts of the final score by name, not weighted; see `edje_index.scoring.weights.PART_NAMES`.

    Example:
        >>> from edje_index import TokenIndex
        >>> hit = TokenIndex.open("photos.edje").search("a dog", k=1, pool=4)[0]
        >>> sorted(hit.parts), hit.score == hit.joint_score == hit.parts["logit"]
        (['logit'], True)
    """

    row_id: int
    uri: str
    score: float
    embedding_score: float
    joint_score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


def best_hits(root: Path, candidates: Candidates, scores: CandidateScores, k: int) -> list[Hit]:
    """The `k` candidates with the highest final scores, best first; of equal scores the lower row id comes first."""
    order = np.lexsort((candidates.rows, -scores.final))[:k]
    uris = read_rows(root, candidates.rows[order], ["uri"])["uri"].to_pylist()
    return [
        Hit(
            row_id=int(candidates.rows[position]),
            uri=uri,
            score=float(scores.final[position]),
            embedding_score=float(candidates.similarities[position]),
            joint_score=None if scores.joint is None else float(scores.joint[position]),
            parts={part: float(values[position]) for part, values in scores.parts.items()},
        )
        for position, uri in zip(order, uris, strict=True)
    ]
