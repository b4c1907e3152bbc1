"""Computes the final scores of candidates. The caller reads the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Pairs, reads_tokens
from edje_index.scoring.weights import BUNDLE_SCORE, EMBEDDING, HUBNESS, JOINT_PARTS, LOGIT, TEXT_TO_IMAGE, ScoreWeights
from edje_index.search.stages import JOINT_ENCODER, OTHER_PARTS, Stages, TimedPart
from storage_formats.codecs import Blocks
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings

if TYPE_CHECKING:
    from edje_index.search.search_model import SearchModel


@dataclass(frozen=True)
class Candidates:
    """The candidates of one query.

    Attributes:
        rows: row ids, int64 [k].
        similarities: cosine similarity of the query's embedding and each row's embedding, float32 [k].
    """

    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]

    def without(self, row_ids: Sequence[int]) -> Candidates:
        """Return the candidates without those in `row_ids`."""
        kept = ~np.isin(self.rows, row_ids)
        return Candidates(self.rows[kept], self.similarities[kept])


@dataclass(frozen=True)
class CandidateScores:
    """The scores of k candidates.

    Attributes:
        final: the final scores, float32 [k].
        joint: weighted sum of only logit, late interaction and pooled similarity, float32 [k]. None if the final score
            has none of these parts.
        parts: values of each part of the final score, without weights, by part name, float32 [k] each.
    """

    final: NDArray[np.float32]
    joint: NDArray[np.float32] | None
    parts: Mapping[str, NDArray[np.float32]]


class Reranker:
    """Scores the candidates of text queries.

    Args:
        index: an open index.
        model: model of the bundle that built the index.
        score: final score to compute. See `scoring.weights.parse_score`.
        stages: object to which the durations of stages are added; None to use a new object.

    Raises:
        UsageError, ModelError: as for `ModelBundle.weights`.
        ModelError: the score needs adapter tokens, but the index stores patch features.
    """

    def __init__(
        self,
        index: CommittedIndex,
        model: SearchModel,
        *,
        score: str | ScoreWeights = BUNDLE_SCORE,
        stages: Stages | None = None,
    ) -> None:
        weights = model.weights(TEXT_TO_IMAGE, score)
        self._index = index
        self._score = FinalScore.of(weights)
        self.stages = stages or Stages()
        self._parts = {
            name: TimedPart(part, self.stages, JOINT_ENCODER if name == LOGIT else OTHER_PARTS)
            for name, part in model.parts(TEXT_TO_IMAGE, weights).items()
        }
        if self.reads_tokens:
            check_reranks(model)

    @property
    def reads_tokens(self) -> bool:
        """True if the final score needs the tokens of the candidates."""
        return reads_tokens(self._score.parts, TEXT_TO_IMAGE)

    def scores(
        self, queries: Sequence[str], candidates: Sequence[Candidates], blocks: Blocks | None
    ) -> list[CandidateScores]:
        """Score the candidates of each query, and return one `CandidateScores` per query.

        Candidates of different queries share batches.

        Args:
            queries: texts of the queries.
            candidates: one `Candidates` per query, in the order of `queries`.
            blocks: token blocks [k, m, d] of all candidates: first those of the first query, then those of the next
                query. None if `reads_tokens` is False.
        """
        counts = [len(each.rows) for each in candidates]
        captions = [query for query, count in zip(queries, counts, strict=True) for _ in range(count)]
        embeddings = None
        if HUBNESS in self._score.parts:
            rows = np.concatenate([each.rows for each in candidates])
            embeddings = read_embeddings(self._index, rows)
        similarities = np.concatenate([each.similarities for each in candidates])
        values = dict.fromkeys(self._score.parts, similarities)  # no model is called without pairs
        if captions:
            values = self._score.compute(self._parts, Pairs(captions, blocks, similarities, embeddings))
        ends = np.cumsum(counts).tolist()
        return [
            self._weighted({part: value[end - count : end] for part, value in values.items()})
            for end, count in zip(ends, counts, strict=True)
        ]

    def score_new(self, pairs: Pairs) -> NDArray[np.float32]:
        """Return the final scores of b images that are not in the index, float32 [b].

        All fields of `pairs` are required.
        """
        return self._weighted(self._score.compute(self._parts, pairs)).final

    def _weighted(self, parts: Mapping[str, NDArray[np.float32]]) -> CandidateScores:
        joint = self._score.only(JOINT_PARTS)
        return CandidateScores(
            final=self._score.sum(parts), joint=joint.sum(parts) if joint.parts else None, parts=parts
        )


def embedding_scores(candidates: Candidates) -> CandidateScores:
    """Return the scores of a search without re-ranking. The final score of a candidate is its embedding similarity."""
    return CandidateScores(candidates.similarities, None, {EMBEDDING: candidates.similarities})


def check_reranks(model: SearchModel) -> None:
    """Raise ModelError if the bundle makes patch features, which the joint encoder cannot score."""
    config = model.adapter_config
    if config.is_feature:
        raise ModelError(
            f"the index stores features for training ({config.kind}), which cannot be re-ranked: search "
            "without re-ranking, or use an index of a trained bundle"
        )
