"""The weights of one direction's final score, and what they are worth on images that they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edje_index.scoring.weights import ScoreWeights
from edje_index.training.fitting.likelihood import BankProducts, Scores, likeliest_weights, likeliest_with_prior

_FOLDS = 5


@dataclass(frozen=True)
class WeightChoice:
    """What the dev captions say of one direction; recalls are R@1 between 0 and 1.

    Attributes:
        weights: chosen or given.
        recall: with them, on the queries that they were fitted to.
        held_out_recall: of all queries, those of each fifth of the images (each image, where there are few) asked with
            weights that were fitted to the queries of the others. Images of that fifth may be wrong answers there. None
            with a single image.
        logit_recall: of the logit alone.
        embedding_recall: without re-ranking.
        queries, pool: how many, and how many candidates were re-ranked for each.
    """

    weights: ScoreWeights
    recall: float
    held_out_recall: float | None
    logit_recall: float
    embedding_recall: float
    queries: int
    pool: int


@dataclass(frozen=True)
class Candidates:
    """What a choice is made on: q queries with p candidates each.

    Attributes:
        similarities: of the embeddings, float32 [q, p].
        logits, late, pooled: parts of the score, float32 [q, p].
        right: which candidates answer the query [q, p].
        images: the image that each query is, or that its caption belongs to, in numbers of any kind, int64 [q].
        bank: what a query bank makes of the candidates; None without one.
    """

    similarities: Scores
    logits: Scores
    late: Scores
    pooled: Scores
    right: NDArray[np.bool_]
    images: NDArray[np.int64]
    bank: BankProducts | None

    def of(self, queries: NDArray[np.bool_]) -> Self:
        """Those of some queries, bool [q]."""
        columns = {name: getattr(self, name)[queries] for name in _COLUMNS}
        bank = None if self.bank is None else replace(self.bank, which=self.bank.which[queries])
        return replace(self, **columns, bank=bank)

    def fit(self, given: Sequence[float | None]) -> ScoreWeights:
        """The likeliest weights; `given` holds those of similarity, late interaction and pooled, None where free."""
        terms = (self.similarities, self.late, self.pooled)
        if self.bank is None:
            return ScoreWeights(*likeliest_weights(self.logits, terms, self.right, given))
        return likeliest_with_prior(self.logits, terms, self.right, given, self.bank)

    def hits(self, weights: ScoreWeights) -> NDArray[np.bool_]:
        """Of which queries the highest final score, the first of equals, is right: bool [q]."""
        terms = (self.similarities, self.late, self.pooled)
        scores = self.logits + sum(weight * term for weight, term in zip(weights[:3], terms, strict=True))
        if self.bank is not None:
            scores = scores - weights.prior * self.bank.priors(weights)
        return self.best_is_right(scores)

    def best_is_right(self, scores: NDArray[Any]) -> NDArray[np.bool_]:
        """The same of scores [q, p] of any kind."""
        found: NDArray[np.bool_] = np.take_along_axis(self.right, scores.argmax(axis=1)[:, None], axis=1)[:, 0]
        return found


_COLUMNS = [field.name for field in fields(Candidates) if field.name != "bank"]


def choose(asked: Candidates, given: Sequence[float | None], on_fit: Callable[[], None] = lambda: None) -> WeightChoice:
    """The likeliest weights of one direction, and recalls; `on_fit` is called before each of the fits, it may raise."""
    on_fit()
    weights = asked.fit(given)
    return WeightChoice(
        weights=weights,
        recall=float(asked.hits(weights).mean()),
        held_out_recall=_held_out(asked, given, on_fit),
        logit_recall=float(asked.best_is_right(asked.logits).mean()),
        embedding_recall=float(asked.best_is_right(asked.similarities).mean()),
        queries=len(asked.right),
        pool=asked.right.shape[1],
    )


def _held_out(asked: Candidates, given: Sequence[float | None], on_fit: Callable[[], None]) -> float | None:
    """R@1 by cross-validation over the images."""
    images, which = np.unique(asked.images, return_inverse=True)
    if len(images) < 2:
        return None
    folds = which % _FOLDS
    hits = []
    for fold in np.unique(folds):
        on_fit()
        weights = asked.of(folds != fold).fit(given)
        hits.append(asked.of(folds == fold).hits(weights))
    return float(np.concatenate(hits).mean())
