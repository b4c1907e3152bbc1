"""Scores pools of dev captions and dev images, on which the model was not trained, and
fits the weights of the final score to them by maximum likelihood.

The fit maximises the softmax probability of the relevant candidates of each query. A
candidate is relevant to a query if one of the two is a caption of the other.
Maximising recall directly overfits a small dev set (docs/lab/score.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import logsumexp

from edje_index.bundles.bundle import ModelBundle
from edje_index.evaluation.pools import score_pairs, split_set
from edje_index.progress import OnProgress
from edje_index.scoring.weights import (
    JOINT_PARTS,
    LOGIT,
    PART_NAMES,
    ScoreWeights,
)
from edje_index.training.config import FittingConfig
from edje_index.training.dataset import TrainingData
from edje_index.training.start import trained_part
from storage_formats.arrays import Bools

Scores = NDArray[np.floating[Any]]

# Weight of the penalty on the squares of the fitted numbers. Before a fit, the values
# that these numbers multiply are scaled to standard deviation 1.
_REGULARISATION = 0.01
# The weights are the factors of the parts divided by the factor of the logit, but at
# least by this fraction of the largest factor.
_LEAST_LOGIT = 1e-3


@dataclass(frozen=True)
class DevPools:
    """The pools of q queries with p candidates each, in one direction.

    Attributes:
        parts: value of each part of the final score, float32 [q, p] by name.
        right: True for candidates that are relevant to the query, bool [q, p].
    """

    parts: Mapping[str, Scores]
    right: Bools

    def hits(self, weights: ScoreWeights) -> Bools:
        """Return which queries have a relevant candidate at rank 0, bool [q].

        If candidates have equal final scores, the first candidate has the lower rank.
        """
        best = weights.sum(self.parts).argmax(axis=1)[:, None]
        hits: Bools = np.take_along_axis(self.right, best, axis=1)[:, 0]
        return hits


def dev_pools(
    bundle: ModelBundle,
    dev: TrainingData,
    config: FittingConfig,
    folder: Path,
    identity: str,
    names: tuple[str, ...] = JOINT_PARTS,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> dict[str, DevPools]:
    """Score the candidates whose embeddings are most similar to each dev query. Return
    the pools of each direction.

    The modules of `bundle` must be in evaluation mode.

    Args:
        dev: the dev images and their captions.
        folder, identity: see `score_pairs`.
        names: parts of the final score to compute. Parts that `bundle` lacks are left
            out. The embedding similarity is always part of the result.
        on_progress: called with the name of the activity, the number of scored pairs,
            and the number of all pairs. An exception raised by `on_progress` stops this
            function.
    """
    queries = split_set(dev.captions(0, dev.images), np.arange(dev.images))
    queries = queries.subsampled(config.dev_captions, seed=0)
    images = dev.embeddings(np.arange(dev.images))
    nearest = queries.pools(images, dev.records["embedding"], config.dev_pool)
    # Most images are in several pools. The features of each image are read once.
    images_of_pools = [queries.pairs(*item)[1].ravel() for item in nearest.items()]
    scored = np.unique(np.concatenate(images_of_pools))
    adapter = trained_part(bundle.adapter)
    tokens = torch.cat([*dev.iter_tokens(adapter, scored, bundle.joint.device)])
    scorer = bundle.scorer
    parts = score_pairs(
        scorer,
        [name for name in names if name in scorer.part_names],
        queries,
        nearest,
        lambda images: tokens[torch.from_numpy(np.searchsorted(scored, images))],
        on_progress,
        "pairs of dev captions and images scored",
        folder,
        identity,
    )
    return {
        direction: DevPools(parts[direction], pools.relevant)
        for direction, pools in nearest.items()
    }


@dataclass(frozen=True)
class WeightChoice:
    """The fitted weights of one direction, and recalls that were measured with them.

    All recalls are R@1, as a fraction of the queries.

    Attributes:
        recall: R@1 with `weights`, on the queries that were used for the fit.
        logit_recall: R@1 with the logit alone.
        embedding_recall: R@1 with the embedding similarity alone.
        queries: number of queries.
        pool: number of candidates per query.
        logit_range: smallest and largest logit in the pools.
    """

    weights: ScoreWeights
    recall: float
    logit_recall: float
    embedding_recall: float
    queries: int
    pool: int
    logit_range: tuple[float, float]


def choose_weights(pools: DevPools) -> WeightChoice:
    """Fit the weights of one direction to `pools`, and measure R@1."""
    weights = fit_weights(pools)
    weights = replace(
        weights,
        calibration=fit_calibration(weights.sum(pools.parts), pools.right),
        shares=part_shares(pools, weights),
    )
    by_embedding = ScoreWeights(logit=0.0, embedding=1.0)
    logits = pools.parts[LOGIT]
    return WeightChoice(
        weights=weights,
        recall=float(pools.hits(weights).mean()),
        logit_recall=float(pools.hits(ScoreWeights()).mean()),
        embedding_recall=float(pools.hits(by_embedding).mean()),
        queries=len(pools.right),
        pool=pools.right.shape[1],
        logit_range=(float(logits.min()), float(logits.max())),
    )


def fit_weights(pools: DevPools) -> ScoreWeights:
    """Return the maximum-likelihood weights.

    The weight of the logit is 1. Weights are never negative. Queries without a relevant
    candidate are ignored. If this ignores all queries, the other weights are 0.
    """
    answered: Bools = np.any(pools.right, axis=1)
    if not answered.any() or pools.right.shape[1] == 1:
        return ScoreWeights()
    right = pools.right[answered]
    columns = np.stack(
        [values[answered] for values in pools.parts.values()], dtype=np.float64
    )
    scales = columns.std(axis=(1, 2)).clip(min=1e-9)
    columns /= scales[:, None, None]

    # This loss is convex if each query has exactly one relevant candidate.
    def loss(factors: NDArray[np.float64]) -> float:
        scores = np.tensordot(factors, columns, 1)
        relevant = logsumexp(np.where(right, scores, -np.inf), axis=1)
        penalty = _REGULARISATION / len(scores) * np.square(factors).sum()
        return float(np.mean(logsumexp(scores, axis=1) - relevant) + penalty)

    bounds = [(0, None)] * len(columns)
    start = np.ones(len(columns))
    factors = minimize(loss, start, bounds=bounds, options={"ftol": 1e-12}).x / scales
    by_part = dict(zip(pools.parts, factors.tolist(), strict=True))
    # All factors are divided by the factor of the logit, so that the weight of the
    # logit is 1. If the factor of the logit is close to 0, a larger divisor is used,
    # which limits the other weights to 1 / _LEAST_LOGIT.
    unit = max(by_part[LOGIT], factors.max() * _LEAST_LOGIT, 1e-9)
    weights = {part: factor / unit for part, factor in by_part.items()}
    return ScoreWeights.of_parts({**weights, LOGIT: 1.0})


def part_shares(pools: DevPools, weights: ScoreWeights) -> dict[str, float] | None:
    """Return the share of each part in the spread of the final score, by name; None if
    no part varies.

    The spread of a part is its standard deviation over the pools, multiplied by its
    absolute weight. The share of a part is its spread, divided by the sum of the
    spreads of all parts.
    """
    spreads = dict.fromkeys(PART_NAMES, 0.0)
    for part, weight in weights.by_part().items():
        spreads[part] = abs(weight) * float(np.std(pools.parts[part], dtype=np.float64))
    total = sum(spreads.values())
    return {part: spread / total for part, spread in spreads.items()} if total else None


def fit_calibration(scores: Scores, right: Bools) -> tuple[float, float] | None:
    """Fit the relevance as a logistic function of the final score.

    The weights of the candidates are chosen so that the size of the pools has little
    effect on the fit. All relevant candidates together have the weight 1/2, and all
    other candidates together have the weight 1/4. The best other candidate of each pool
    is counted a second time, with the weight 1/4 for all pools together. It would be
    the first hit if the collection contained no match for the query.

    Args:
        scores: final scores of the candidates of each query [q, p].
        right: True for candidates that are relevant to the query, bool [q, p].

    Returns:
        (slope, offset) of the relevance, which is the logistic function of slope *
        final score + offset. None if the fitted slope is not positive, or if all or
        none of the candidates are relevant.
    """
    has_other = ~right.all(axis=1)
    if not right.any() or not has_other.any():
        return None
    best_others = np.where(right, -np.inf, scores)[has_other].max(axis=1)
    groups = (scores[right], scores[~right], best_others)
    values = np.concatenate(groups).astype(np.float64)
    sizes = [len(group) for group in groups]
    weights = np.repeat([0.5, 0.25, 0.25], sizes) / np.repeat(sizes, sizes)
    is_right = np.arange(len(values)) < sizes[0]
    mean = float(values.mean())
    deviation = float(values.std()) or 1.0
    values = (values - mean) / deviation

    def loss(line: NDArray[np.float64]) -> float:
        logits = line[0] * values + line[1]
        losses = np.logaddexp(0, logits) - is_right * logits
        penalty = _REGULARISATION / right.size * np.square(line).sum()
        return float((weights * losses).sum() + penalty)

    slope, offset = minimize(loss, np.zeros(2)).x.tolist()
    return (slope / deviation, offset - slope * mean / deviation) if slope > 0 else None
