"""Weights under which a softmax over candidates is likeliest to be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.scoring.weights import ScoreWeights

Scores = NDArray[np.floating[Any]]
_PRIOR = 0.01  # of factors of columns that are scaled to deviation 1
_LEAST_LOGIT = 1e-3  # of the largest factor
_STEPS = 100
_RANGE = math.log(100)
_LEAST_GAIN = 1e-6  # of the mean loss, for a prior to count


def likeliest_weights(
    logits: Scores, terms: Sequence[Scores], right: NDArray[np.bool_], fixed: Sequence[float | None]
) -> list[float]:
    """Weights of `terms` beside the logits, none below 0, under which a softmax over a pool is likeliest to be right.

    Recall itself is no measure to choose by: of many weights the luckiest wins. Chosen on 1,000 captions by R@1
    on a grid, weights lost up to 1.2 points on 4,000 others; by likelihood at most 0.2 (docs/architecture.md).

    Args:
        logits: of the pool's images, float [c, p].
        terms: what is added, float [c, p] each.
        right: which image is the caption's own [c, p]; captions whose image is not in the pool say nothing.
        fixed: weights that are given, None for one that is looked for.
    """
    there = right.any(axis=1)
    known = logits + sum(w * term for w, term in zip(fixed, terms, strict=True) if w is not None)
    columns = [known, *(term for w, term in zip(fixed, terms, strict=True) if w is None)]
    if not there.any() or len(columns) == 1 or right.shape[1] == 1:  # nothing to tell apart, or nothing to find
        return [w or 0.0 for w in fixed]
    values = torch.from_numpy(np.stack(columns)[:, there].astype(np.float64))
    scale = values.std(dim=(1, 2), correction=0).clamp(min=1e-9)
    factors = _fit(values / scale[:, None, None], torch.from_numpy(right[there])) / scale
    # Where the logits say nothing or worse, the others outweigh them.
    found = (factors[1:] / factors[0].clamp(min=float(factors.max()) * _LEAST_LOGIT).clamp(min=1e-9)).tolist()
    rest = iter(found)
    return [next(rest) if w is None else w for w in fixed]


@dataclass(frozen=True)
class BankProducts:
    """What a query bank makes of n candidates: inner products of embeddings and of pooled vectors, float [n, b] each.

    Attributes:
        similarities, pooled: with the b captions or images of the bank.
        which: of the n candidates each place of the pools holds, int64 [q, p].
        floor: the lowest prior with given weights, which the search for weights leaves out of account.
    """

    similarities: torch.Tensor
    pooled: torch.Tensor
    which: NDArray[np.int64]
    floor: Callable[[ScoreWeights], float] = lambda weights: -math.inf

    def priors(self, weights: ScoreWeights) -> Scores:
        """Of the candidates with `weights`, not weighted yet: float32 [q, p]."""
        own, t = weights.similarity * self.similarities + weights.pooled * self.pooled, weights.temperature
        priors = t * (torch.logsumexp(own / t, dim=1) - math.log(own.shape[1]))
        found: Scores = priors.clamp(min=self.floor(weights)).float().numpy(force=True)[self.which]
        return found


def likeliest_with_prior(
    logits: Scores,
    terms: Sequence[Scores],
    right: NDArray[np.bool_],
    fixed: Sequence[float | None],
    bank: BankProducts,
) -> ScoreWeights:
    """All weights of the final score together, those of a query bank's prior included.

    The prior holds the weights of similarity and pooled similarity itself, so that these are found anew with it: on
    4,000 captions that were not chosen by, R@1 is higher than with a prior on top of `likeliest_weights`
    (docs/architecture.md). Weights that are 0 without a prior stay 0. A prior that gains no likelihood has weight 0.

    Args:
        logits, right, fixed: see `likeliest_weights`.
        terms: embedding similarity, late interaction and pooled similarity, float [q, p] each.
        bank: of the candidates.
    """
    start = likeliest_weights(logits, terms, right, fixed)
    without = ScoreWeights(*start)
    there = right.any(axis=1)
    if not there.any():
        return without
    problem = _Problem(
        columns=torch.from_numpy(np.stack([logits, *terms])[:, there].astype(np.float64)),
        right=torch.from_numpy(right[there]),
        which=torch.from_numpy(bank.which[there]),
        similarities=bank.similarities.double(),
        pooled=bank.pooled.double(),
        start=without,
        free=torch.tensor([w is None and v > 0 for w, v in zip(fixed, start, strict=True)]),
    )
    return problem.solve() or without


@dataclass(frozen=True)
class _Problem:
    """The loss around `start`: each factor is that of the start times up to 100 or down to a hundredth."""

    columns: torch.Tensor
    right: torch.Tensor
    which: torch.Tensor
    similarities: torch.Tensor
    pooled: torch.Tensor
    start: ScoreWeights
    free: torch.Tensor

    def solve(self) -> ScoreWeights | None:
        """The minimum that is found; None where it is not likelier than the start."""
        scores = self._added(torch.tensor(self.start[:3], dtype=torch.float64))
        unit = scores.std().clamp(min=1e-9)
        factor = (_fit(scores[None] / unit, self.right)[0] / unit).clamp(min=1e-9)
        first = torch.stack([factor, torch.ones_like(factor), scores.std(dim=1).mean().clamp(min=1e-9) / 3])
        best, found, begun = math.inf, None, float(_mean_loss(factor * scores, self.right))
        moved = torch.zeros(3 + int(self.free.sum()), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([moved], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            nonlocal best, found
            optimizer.zero_grad()
            bare, penalty, weights = self._loss(moved, first)
            if bare < best and bare < begun - _LEAST_GAIN:
                best, found = float(bare.detach()), weights
            total = bare + penalty
            total.backward()  # type: ignore[no-untyped-call]
            return total

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        return found

    def _loss(self, moved: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, ScoreWeights]:
        """The loss, the penalty of large factors, and the weights that they are of."""
        times = (_RANGE * torch.tanh(moved / _RANGE)).exp()
        factor, weight, temperature = first * times[:3]
        added = torch.tensor(self.start[:3], dtype=torch.float64)
        added = added.masked_scatter(self.free, added[self.free] * times[3:])
        of_bank = added[0] * self.similarities + added[2] * self.pooled
        prior = temperature * torch.logsumexp(of_bank / temperature, dim=1)
        scores = self._added(added) - weight * prior[self.which]
        every = torch.cat([torch.ones(1, dtype=torch.float64), added])
        penalty = _PRIOR / len(self.right) * (factor * every * self.columns.std(dim=(1, 2))).square().sum()
        weights = ScoreWeights(*(float(value.detach()) for value in (*added, weight, temperature)))
        return _mean_loss(factor * scores, self.right), penalty, weights

    def _added(self, weights: torch.Tensor) -> torch.Tensor:
        """Logits and weighted terms [q, p]."""
        return self.columns[0] + (weights[:, None, None] * self.columns[1:]).sum(dim=0)


def _fit(values: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Factors [f] of columns [f, q, p] that minimise cross-entropy; a column that would get one below 0 is left out."""
    found = torch.zeros(len(values), dtype=torch.float64)
    kept = torch.arange(len(values))
    while len(kept):
        factors = _minimum(values[kept], right)
        if (factors >= 0).all():
            found[kept] = factors
            break
        kept = kept[factors >= 0]
    return found


def _minimum(values: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The factors [f] themselves, under a weak prior; with one right candidate a query the problem is convex."""
    factors = torch.ones(len(values), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([factors], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = _mean_loss((factors[:, None, None] * values).sum(dim=0), right)
        total = total + _PRIOR / len(right) * factors.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return factors.detach()


def _mean_loss(scores: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mean of -log of what a softmax over the candidates [q, p] gives to the right ones together."""
    return (scores.logsumexp(dim=1) - scores.masked_fill(~right, -math.inf).logsumexp(dim=1)).mean()
