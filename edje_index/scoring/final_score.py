"""Computes the relevance of a final score."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.scoring.weights import EMBEDDING, ScoreWeights


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
    if weights.calibration is None and weights.parts == (EMBEDDING,):
        return np.clip((1 + values / abs(weights.embedding)) / 2, 0, 1)
    slope, offset = weights.calibration or (1.0, 0.0)
    # This is the logistic function. In this form it cannot overflow.
    return np.asarray(0.5 * (1 + np.tanh((slope * values + offset) / 2)))
