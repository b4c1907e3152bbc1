"""Computes the final score, a weighted sum of parts. No other module computes this sum.

The logit takes the most time of all parts. A bundle names the range of the logits, so a
search can tell from the other parts which candidates can be among the first k with a
logit in this range. The search computes the logits of these candidates only.
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
    """A weighted sum of parts. In array shapes, p is the number of candidates of a
    query.

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
        """Return the weighted sum of the parts.

        Args:
            values: arrays or tensors of the same shape, by name of the part.

        Raises:
            ValueError: all weights are 0. `may_be_first` also raises this error if the
                logit is the only part.
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
        """Return which candidates can have one of the `k` highest final scores if all
        logits are in `logit_range`, bool [p]. At least `k` candidates are True, or all
        if there are fewer.

        Args:
            values: values of the parts except the logit, by name, float32 [p] each.
            k: number of hits.
            logit_range: smallest and largest logit.
        """
        others = self.only(part for part in self.parts if part != LOGIT).sum(values)
        if len(others) <= k:
            return np.ones(len(others), dtype=np.bool_)
        # `others` has the weighted sum of the other parts for each candidate. The
        # weighted logits of two candidates differ by at most `width`. A candidate whose
        # sum is more than `width` below the k-th best sum therefore has a lower final
        # score than the k candidates with the best sums.
        width = abs(self.weights[LOGIT]) * (logit_range[1] - logit_range[0])
        mask: NDArray[np.bool_] = others >= np.partition(others, -k)[-k] - width
        return mask


def relevance(
    scores: NDArray[np.floating[Any]], weights: ScoreWeights
) -> NDArray[np.float64]:
    """Return the relevance of each score, between 0 and 1. A higher score never has a
    lower relevance.

    With a calibration, the relevance is a logistic function of the score. It was fitted
    on the pools of development queries, to tell matching pairs from pairs that do not
    match. Both kinds of pairs have the same total weight in the fit, so at a relevance
    of 0.5, both kinds are equally likely. Half of the weight of the pairs that do not
    match is given to the best such pair of each pool, which would be the first hit if
    the query had no match. For photos and texts other
    than those of the fit, the relevance is not the probability of a match.

    Without a calibration, the relevance is (1 + cosine) / 2 if the score is the
    embedding similarity alone, and the logistic function of the score otherwise. If the
    score is the logit alone, this is the match probability of the joint encoder.

    Args:
        scores: final scores, in an array of any shape.
        weights: weights with which `scores` were computed.
    """
    values = np.asarray(scores, dtype=np.float64)
    if weights.calibration is None and FinalScore.of(weights).parts == (EMBEDDING,):
        return np.clip((1 + values / abs(weights.embedding)) / 2, 0, 1)
    slope, offset = weights.calibration or (1.0, 0.0)
    # This is the logistic function. In this form it cannot overflow.
    return np.asarray(0.5 * (1 + np.tanh((slope * values + offset) / 2)))
