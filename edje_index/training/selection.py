"""Choosing what is added to the matching logit, on captions that were not trained on.

Re-ranking sorts by logit + v x late interaction + u x pooled similarity + w x embedding similarity (ALBEF and BLIP add
the last); trained logits have no scale of their own, so that all weights are fitted. What a query bank takes off comes
last, with the weights before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.bundle import ModelBundle
from edje_index.devices import resolve_device
from edje_index.query_bank import QueryBank
from edje_index.text import TextTower
from edje_index.training.batches import Features
from edje_index.training.config import SelectionConfig
from edje_index.training.dataset import CaptionSet, image_embeddings
from edje_index.training.objectives import trained_part
from edje_index.training.sampling import stream

Scores = NDArray[np.floating[Any]]
_PRIOR = 0.01  # of factors of columns that are scaled to deviation 1
_LEAST_LOGIT = 1e-3  # of the largest factor
_ADAPTER_BATCH = 32
_TEMPERATURES = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1)  # of the spread of an image's scores over the bank

OnProgress = Callable[[int, int], None]
"""Called with captions done and their number."""


class Weights(NamedTuple):
    """Of what is added to the logit."""

    similarity: float
    late: float
    pooled: float


class Prior(NamedTuple):
    """Of the query bank: the weight of its prior and the temperature."""

    weight: float
    temperature: float


@dataclass(frozen=True)
class DevSet:
    """Images n and captions c that are not trained on.

    Attributes:
        rows: of the images in the feature index, int64 [n].
        captions: texts.
        owner: which image each caption belongs to, int64 [c].
        image_embeddings, text_embeddings: of the towers, float32 [n, e] and [c, e].
    """

    rows: NDArray[np.int64]
    captions: list[str]
    owner: NDArray[np.int64]
    image_embeddings: NDArray[np.float32]
    text_embeddings: NDArray[np.float32]

    def sample(self, count: int) -> DevSet:
        """At most `count` captions, always the same ones; all images stay."""
        kept = np.sort(stream(0, 0).permutation(len(self.captions))[:count])
        return DevSet(
            self.rows,
            [self.captions[at] for at in kept],
            self.owner[kept],
            self.image_embeddings,
            self.text_embeddings[kept],
        )


@dataclass(frozen=True)
class WeightChoice:
    """What the dev captions say; recalls are text-to-image R@1 between 0 and 1.

    Attributes:
        weights: chosen or given.
        prior: of the query bank; None without.
        recall: with all of them.
        logit_recall: of the logit alone.
        embedding_recall: without re-ranking.
        captions, pool: how many captions, and how many images were re-ranked for each.
    """

    weights: Weights
    prior: Prior | None
    recall: float
    logit_recall: float
    embedding_recall: float
    captions: int
    pool: int


def make_dev_set(items: CaptionSet, tower: TextTower, features: Path) -> DevSet:
    """Captions with their embeddings and those of their images, which are in the index `features`."""
    owner = np.repeat(np.arange(len(items.rows)), [len(group) for group in items.captions])
    return DevSet(items.rows, items.texts(), owner, image_embeddings(features, items.rows), tower.encode(items.texts()))


def choose_weights(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    config: SelectionConfig,
    device: str,
    on_progress: OnProgress = lambda done, total: None,
) -> WeightChoice:
    """The weights that `config` leaves open, by maximum likelihood; leaves the model on `device`."""
    bundle.adapter.to(resolve_device(device)).eval()
    bundle.joint.to(resolve_device(device)).eval()
    dev = dev.sample(config.dev_captions)
    similar = dev.text_embeddings @ dev.image_embeddings.T
    pool = min(config.dev_pool, len(dev.rows))
    nearest = np.argsort(-similar, axis=1, kind="stable")[:, :pool]
    used, places = np.unique(nearest, return_inverse=True)
    which = places.reshape(nearest.shape)
    stored = _stored_tokens(bundle, features, dev.rows[used])
    logits, late, pooled = _scores(bundle, dev.captions, stored, which, on_progress)
    near = np.take_along_axis(similar, nearest, axis=1)
    right = nearest == dev.owner[:, None]
    fixed = (config.embedding_weight, config.late_weight, config.pooled_weight if bundle.joint.pooled else 0.0)
    weights = Weights(*likeliest_weights(logits, (near, late, pooled), right, fixed))
    scores = logits + weights.similarity * near + weights.late * late + weights.pooled * pooled
    prior = None
    if bundle.bank is not None:
        vectors = bundle.joint.image_vectors(stored)
        embeddings = torch.from_numpy(dev.image_embeddings[used]).to(vectors.device)
        bank, in_score = bundle.bank, (weights.similarity, weights.pooled)
        prior, taken = _choose_prior(bank, (embeddings, vectors), in_score, scores, which, right)
        scores = scores - taken
    return WeightChoice(
        weights=weights,
        prior=prior,
        recall=_recall(scores, right),
        logit_recall=_recall(logits, right),
        embedding_recall=_recall(near, right),
        captions=len(dev.captions),
        pool=pool,
    )


def _choose_prior(
    bank: QueryBank,
    images: tuple[torch.Tensor, torch.Tensor],
    in_score: tuple[float, float],
    scores: Scores,
    which: NDArray[np.int64],
    right: NDArray[np.bool_],
) -> tuple[Prior, Scores]:
    """The likeliest weight and temperature, and what is taken off the scores [c, p] with them.

    Args:
        bank: to compare with.
        images: embeddings [n, e] and pooled vectors [n, k].
        in_score: the weights of both in the score.
        scores: without the prior [c, p].
        which: of the n images each of them is of [c, p].
        right: as in `likeliest_weights`.
    """
    spread = bank.spread(*images, in_score)
    best, found, taken = math.inf, Prior(0.0, max(spread, 1.0)), np.zeros_like(scores)
    for part in _TEMPERATURES if spread else ():
        priors = bank.of_images(*images, in_score, part * spread).numpy(force=True)[which]
        (weight,) = likeliest_weights(scores, (-priors,), right, (None,))
        loss = _cross_entropy(scores - weight * priors, right)
        if loss < best:
            best, found, taken = loss, Prior(weight, part * spread), weight * priors
    return found, taken


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
    if not there.any() or len(columns) == 1:
        return [w or 0.0 for w in fixed]
    values = torch.from_numpy(np.stack(columns)[:, there].astype(np.float64))
    scale = values.std(dim=(1, 2)).clamp(min=1e-9)
    target = torch.from_numpy(right[there].argmax(axis=1))
    factors = _fit(values / scale[:, None, None], target) / scale
    # Where the logits say nothing or worse, the others outweigh them.
    found = (factors[1:] / factors[0].clamp(min=float(factors.max()) * _LEAST_LOGIT).clamp(min=1e-9)).tolist()
    rest = iter(found)
    return [next(rest) if w is None else w for w in fixed]


def _fit(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Factors [f] of columns [f, c, p] that minimise cross-entropy; a column that would get one below 0 is left out."""
    found = torch.zeros(len(values), dtype=torch.float64)
    kept = torch.arange(len(values))
    while len(kept):
        factors = _minimum(values[kept], target)
        if (factors >= 0).all():
            found[kept] = factors
            break
        kept = kept[factors >= 0]
    return found


def _minimum(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The factors [f] themselves: cross-entropy with a weak prior is convex in them."""
    factors = torch.ones(len(values), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([factors], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = functional.cross_entropy((factors[:, None, None] * values).sum(dim=0), target)
        total = total + _PRIOR / len(target) * factors.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return factors.detach()


def _cross_entropy(scores: Scores, right: NDArray[np.bool_]) -> float:
    """Of a softmax over the pool, at the scale of the scores that is best for it."""
    there = right.any(axis=1)
    if not there.any():
        return 0.0
    values = torch.from_numpy(scores[there].astype(np.float64))[None]
    target = torch.from_numpy(right[there].argmax(axis=1))
    values = values / values.std().clamp(min=1e-9)
    return float(functional.cross_entropy((_fit(values, target)[:, None, None] * values).sum(dim=0), target))


def _recall(scores: NDArray[Any], right: NDArray[np.bool_]) -> float:
    """Part of the rows whose highest score, the first of equals, is right."""
    return float(np.take_along_axis(right, scores.argmax(axis=1)[:, None], axis=1).mean())


@torch.inference_mode()
def _stored_tokens(bundle: ModelBundle, features: Features, rows: NDArray[np.int64]) -> torch.Tensor:
    """Tokens [n, m, d] of rows of the features, rounded as they are stored."""
    adapter = trained_part(bundle.adapter)
    device = bundle.joint.text_projection.weight.device
    parts = []
    for start in range(0, len(rows), _ADAPTER_BATCH):
        blocks = features.fetch(rows[start : start + _ADAPTER_BATCH])
        parts.append(adapter(blocks.to(device).float()).bfloat16().cpu())
    return torch.cat(parts)


@torch.inference_mode()
def _scores(
    bundle: ModelBundle,
    captions: Sequence[str],
    stored: torch.Tensor,
    which: NDArray[np.int64],
    on_progress: OnProgress,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Logits, late interaction and pooled similarity [c, p] of captions with their nearest images.

    Args:
        bundle: whose adapter made the tokens.
        captions: c texts.
        stored: tokens of the images [n, m, d].
        which: of the n images are near to each caption [c, p].
        on_progress: of the captions.
    """
    logits, late, pooled = [], [], []
    for done, (text, near) in enumerate(zip(captions, which, strict=True)):
        on_progress(done, len(which))
        logits.append(bundle.joint.score(text, stored[near]).numpy())
        late.append(bundle.joint.late_interaction([text] * len(near), stored[near]).numpy(force=True))
        pooled.append(bundle.joint.pooled_similarity([text] * len(near), stored[near]).numpy(force=True))
    return np.stack(logits), np.stack(late), np.stack(pooled)
