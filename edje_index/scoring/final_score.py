"""Computes the final score, a weighted sum of parts. No other module computes this sum.

The joint encoder is the most expensive part. A bundle contains the range of its logits,
so a search scores only the candidates that can be among the first k with a logit in
this range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.scoring.weights import EMBEDDING, LOGIT, ScoreWeights

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class FinalScore:
    """A weighted sum of parts. In shapes, p is the number of candidates of one query.

    Attributes:
        weights: weight of each part by name.
    """

    weights: Mapping[str, float]

    @classmethod
    def of(cls, weights: ScoreWeights) -> FinalScore:
        """Return the final score with the given weights of one direction."""
        return cls(weights.by_part())

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts in the sum: those whose weight is not 0."""
        return tuple(part for part, weight in self.weights.items() if weight)

    def only(self, parts: Iterable[str]) -> FinalScore:
        """Return a copy of this final score that contains only the named parts."""
        return FinalScore(
            {part: self.weights[part] for part in parts if part in self.weights}
        )

    def sum(self, values: Mapping[str, Any]) -> Any:
        """Return the weighted sum of the values of the parts by name, which are
        arrays or tensors of the same shape.
        """
        first, *others = self.parts or (None,)
        if first is None:
            raise ValueError(
                "a final score needs at least one part with a weight other than 0"
            )
        total = self.weights[first] * values[first]
        for part in others:
            total = total + self.weights[part] * values[part]
        return total

    def may_be_first(
        self, values: Mapping[str, Floats], k: int, logit_range: tuple[float, float]
    ) -> NDArray[np.bool_]:
        """Return which candidates may have one of the `k` highest final scores, bool
        [p]. These are at least `k`.

        Args:
            values: the parts besides the logit by name, float32 [p] each.
            k: number of hits.
            logit_range: smallest and largest logit.
        """
        others = self.only(part for part in self.parts if part != LOGIT).sum(values)
        if len(others) <= k:
            return np.ones(len(others), dtype=np.bool_)
        width = abs(self.weights[LOGIT]) * (logit_range[1] - logit_range[0])
        mask: NDArray[np.bool_] = others >= np.partition(others, -k)[-k] - width
        return mask


def relevance(
    scores: NDArray[np.floating[Any]], weights: ScoreWeights
) -> NDArray[np.float64]:
    """Return the relevance of each score, between 0 and 1. It never decreases with the
    score.

    With a calibration, the relevance says how strongly the score speaks for a match. It
    is 0.5 where matching pairs of the dev pools are as frequent as other pairs. Half of
    these other pairs are the best hits of captions that match no photo. The relevance
    is no probability for other photos and texts.

    Without a calibration, it is (1 + cosine) / 2 for the embedding similarity alone,
    and the logistic function of the score for other weights. If the score is the logit,
    this is the probability of the joint encoder. `weights` are those of the `scores`,
    which have any shape.
    """
    values = np.asarray(scores, dtype=np.float64)
    if weights.calibration is None and FinalScore.of(weights).parts == (EMBEDDING,):
        return np.clip((1 + values / abs(weights.embedding)) / 2, 0, 1)
    slope, offset = weights.calibration or (1.0, 0.0)
    # the logistic function without overflow
    return np.asarray(0.5 * (1 + np.tanh((slope * values + offset) / 2)))
