"""The second half of a search: the final score of candidates whose tokens have been read."""

from __future__ import annotations

from collections.abc import Mapping
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
    from edje_index.bundles.bundle import ModelBundle


@dataclass(frozen=True)
class Candidates:
    """The rows nearest to a query by embedding, nearest first.

    Attributes:
        rows: row ids, int64 [k].
        similarities: cosine similarities of the embeddings, float32 [k].
    """

    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]


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
        self, root: Path, spec: IndexSpec, model: ModelBundle, *, score: str | ScoreWeights = BUNDLE_SCORE
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

    def scores(self, query: str, candidates: Candidates, blocks: Blocks | None) -> CandidateScores:
        """Score the candidates of `query`.

        Args:
            query: the text.
            candidates: the rows nearest to the query.
            blocks: the tokens of `candidates` [k, m, d]; None if the score reads none.
        """
        embeddings = None
        if HUBNESS in self._score.parts:
            embeddings = read_embeddings(self._root, self._spec, candidates.rows)
        pairs = Pairs([query] * len(candidates.rows), blocks, candidates.similarities, embeddings)
        values = self._score.compute(self._parts, pairs)
        joint = self._score.only(JOINT_PARTS)
        return CandidateScores(
            final=self._score.sum(values), joint=joint.sum(values) if joint.parts else None, parts=values
        )


def embedding_scores(candidates: Candidates) -> CandidateScores:
    """The scores of a search without re-ranking."""
    return CandidateScores(candidates.similarities, None, {EMBEDDING: candidates.similarities})


def check_reranks(model: ModelBundle) -> None:
    """Raise ModelError if the bundle stores features to train on, which its joint encoder cannot score."""
    config = model.adapter.config
    if config.is_feature:
        raise ModelError(
            f"this bundle stores features to train on ({config.kind}), which its joint encoder cannot score: search "
            "without re-ranking, or use an index that a trained bundle built"
        )
