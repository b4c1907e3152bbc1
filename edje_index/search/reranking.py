"""Computes the final scores of candidates. The caller reads the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.scoring.cascade import Cascade
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
        joint: weighted sum of the parts logit, late interaction and pooled similarity, float32 [k]. None if the final
            score has none of these parts.
        parts: values of each part of the final score, without weights, by part name, float32 [k] each. The logit is
            NaN for candidates that the joint encoder does not score.
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
        joint_pool: number of candidates per query that the joint encoder scores, see `scoring.cascade`; None for all.

    Raises:
        UsageError, ModelError: as for `ModelBundle.weights` and `Cascade`.
        ModelError: the score needs adapter tokens, but the index stores patch features.
    """

    def __init__(
        self,
        index: CommittedIndex,
        model: SearchModel,
        *,
        score: str | ScoreWeights = BUNDLE_SCORE,
        stages: Stages | None = None,
        joint_pool: int | None = None,
    ) -> None:
        weights = model.weights(TEXT_TO_IMAGE, score)
        self._index = index
        self._score = FinalScore.of(weights)
        self._cascade = None if joint_pool is None else Cascade(self._score, joint_pool)
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
        rows = np.concatenate([each.rows for each in candidates])
        embeddings = read_embeddings(self._index, rows) if HUBNESS in self._score.parts else None
        similarities = np.concatenate([each.similarities for each in candidates])
        of_each = [slice(end - count, end) for end, count in zip(np.cumsum(counts).tolist(), counts, strict=True)]
        values = dict.fromkeys(self._score.parts, similarities)  # no model is called without pairs
        if captions:
            values = self._compute(Pairs(captions, blocks, similarities, embeddings), rows, of_each)
        return [self._weighted(_at(values, its_pairs)) for its_pairs in of_each]

    def _compute(
        self, pairs: Pairs, rows: NDArray[np.int64], of_each: Sequence[slice]
    ) -> dict[str, NDArray[np.float32]]:
        """Compute the parts for `pairs`. With a cascade, some logits are NaN.

        Args:
            pairs: the pairs of all queries.
            rows: row id of each pair's candidate.
            of_each: for each query, the slice of `pairs` that belongs to it.
        """
        if self._cascade is None:
            return self._score.compute(self._parts, pairs)
        others = self._cascade.others.compute(self._parts, pairs)
        chosen = np.concatenate(
            [self._cascade.chosen(_at(others, its_pairs), rows[its_pairs]) for its_pairs in of_each]
        )
        logits = np.full(len(rows), np.nan, dtype=np.float32)
        logits[chosen] = self._parts[LOGIT].of(pairs.at(chosen))
        return {LOGIT: logits, **others}

    def score_new(self, pairs: Pairs) -> NDArray[np.float32]:
        """Return the final scores of b images that are not in the index, float32 [b].

        All fields of `pairs` are required.
        """
        return self._weighted(self._score.compute(self._parts, pairs)).final

    def _weighted(self, parts: Mapping[str, NDArray[np.float32]]) -> CandidateScores:
        joint = self._score.only(JOINT_PARTS)
        summed = parts if self._cascade is None else self._cascade.with_every_logit(parts)
        return CandidateScores(
            final=self._score.sum(summed), joint=joint.sum(summed) if joint.parts else None, parts=parts
        )


def _at(values: Mapping[str, NDArray[np.float32]], pairs: slice) -> dict[str, NDArray[np.float32]]:
    return {part: value[pairs] for part, value in values.items()}


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
