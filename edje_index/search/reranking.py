"""The second half of a search: the final score of candidates whose tokens have been read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Pairs, reads_tokens
from edje_index.scoring.weights import BUNDLE_SCORE, EMBEDDING, HUBNESS, JOINT_PARTS, TEXT_TO_IMAGE, ScoreWeights
from storage_formats.codecs import Blocks
from storage_formats.format.layout import IndexSpec
from storage_formats.reading.embeddings import read_embeddings

if TYPE_CHECKING:
    from edje_index.search.search_model import SearchModel


@dataclass(frozen=True)
class Candidates:
    """The rows to score for a query.

    Attributes:
        rows: row ids, int64 [k].
        similarities: cosine similarities of the embeddings, float32 [k].
    """

    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]

    def without(self, row_ids: Sequence[int]) -> Candidates:
        """These candidates without some rows."""
        kept = ~np.isin(self.rows, row_ids)
        return Candidates(self.rows[kept], self.similarities[kept])


@dataclass(frozen=True)
class CandidateScores:
    """The scores of k candidates.

    Attributes:
        final: the final scores, float32 [k].
        joint: the share of `final` that depends on the query and the tokens together (logit, late interaction and
            pooled similarity, weighted), float32 [k]; None if the score has none of them.
        parts: the parts that count, not weighted, float32 [k] each.
    """

    final: NDArray[np.float32]
    joint: NDArray[np.float32] | None
    parts: Mapping[str, NDArray[np.float32]]


class Reranker:
    """Scores the candidates of text queries.

    Args:
        root: the index.
        spec: the layout of the index.
        model: the bundle that built it.
        score: the score to sort by, see `scoring.weights.parse_score`.

    Raises:
        UsageError, ModelError: see `ModelBundle.weights`. ModelError also if the score needs tokens and the index
            stores features.
    """

    def __init__(
        self, root: Path, spec: IndexSpec, model: SearchModel, *, score: str | ScoreWeights = BUNDLE_SCORE
    ) -> None:
        weights = model.weights(TEXT_TO_IMAGE, score)
        self._root = root
        self._spec = spec
        self._score = FinalScore.of(weights)
        self._parts = model.parts(TEXT_TO_IMAGE, weights)
        if self.reads_tokens:
            check_reranks(model)

    @property
    def reads_tokens(self) -> bool:
        """Whether the score needs the candidates' tokens."""
        return reads_tokens(self._score.parts, TEXT_TO_IMAGE)

    def scores(
        self, queries: Sequence[str], candidates: Sequence[Candidates], blocks: Blocks | None
    ) -> list[CandidateScores]:
        """Score the candidates of each query. Candidates of all queries share batches.

        Args:
            queries: the texts.
            candidates: the candidates of each query.
            blocks: the tokens of all candidates in order [k, m, d]; None if the score reads none.
        """
        counts = [len(each.rows) for each in candidates]
        captions = [query for query, count in zip(queries, counts, strict=True) for _ in range(count)]
        embeddings = None
        if HUBNESS in self._score.parts:
            rows = np.concatenate([each.rows for each in candidates])
            embeddings = read_embeddings(self._root, self._spec, rows)
        similarities = np.concatenate([each.similarities for each in candidates])
        values = dict.fromkeys(self._score.parts, similarities)  # of no pair, the models compute nothing
        if captions:
            values = self._score.compute(self._parts, Pairs(captions, blocks, similarities, embeddings))
        ends = np.cumsum(counts).tolist()
        return [
            self._weighted({part: value[end - count : end] for part, value in values.items()})
            for end, count in zip(ends, counts, strict=True)
        ]

    def score_new(self, pairs: Pairs) -> NDArray[np.float32]:
        """Final scores [b] of pictures that no index holds; all values of `pairs` must be given."""
        return self._weighted(self._score.compute(self._parts, pairs)).final

    def _weighted(self, parts: Mapping[str, NDArray[np.float32]]) -> CandidateScores:
        joint = self._score.only(JOINT_PARTS)
        return CandidateScores(
            final=self._score.sum(parts), joint=joint.sum(parts) if joint.parts else None, parts=parts
        )


def embedding_scores(candidates: Candidates) -> CandidateScores:
    """The scores of a search without re-ranking."""
    return CandidateScores(candidates.similarities, None, {EMBEDDING: candidates.similarities})


def check_reranks(model: SearchModel) -> None:
    """Raise ModelError if the bundle stores features to train on, which its joint encoder cannot score."""
    config = model.adapter_config
    if config.is_feature:
        raise ModelError(
            f"this bundle stores features to train on ({config.kind}), which its joint encoder cannot score: search "
            "without re-ranking, or use an index that a trained bundle built"
        )
