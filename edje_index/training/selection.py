"""Choosing what is added to the matching logit, on captions that were not trained on.

Re-ranking sorts by logit + v x late interaction + u x pooled similarity + w x embedding similarity (ALBEF and BLIP add
the last); trained logits have no scale of their own, so that all weights are looked for on a grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundle import ModelBundle
from edje_index.devices import resolve_device
from edje_index.text import TextTower
from edje_index.training.batches import Features
from edje_index.training.config import SelectionConfig
from edje_index.training.dataset import CaptionSet, read_embeddings
from edje_index.training.objectives import trained_part
from edje_index.training.sampling import stream

GRID = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
_ADAPTER_BATCH = 32

OnProgress = Callable[[int, int], None]
"""Called with captions done and their number."""


class Weights(NamedTuple):
    """Of what is added to the logit."""

    similarity: float
    late: float
    pooled: float


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
        weights: the best of the grid, the smallest of equals.
        recall: by weights.
        embedding_recall: without re-ranking.
        captions, pool: how many captions, and how many images were re-ranked for each.
    """

    weights: Weights
    recall: dict[Weights, float]
    embedding_recall: float
    captions: int
    pool: int


def make_dev_set(items: CaptionSet, tower: TextTower, features: Path) -> DevSet:
    """Captions with their embeddings and those of their images, which are in the index `features`."""
    owner = np.repeat(np.arange(len(items.rows)), [len(group) for group in items.captions])
    return DevSet(items.rows, items.texts(), owner, read_embeddings(features, items.rows), tower.encode(items.texts()))


def choose_weights(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    config: SelectionConfig,
    device: str,
    on_progress: OnProgress = lambda done, total: None,
) -> WeightChoice:
    """Recall of all weights of the grid that `config` leaves open, and the best; leaves the model on `device`."""
    bundle.adapter.to(resolve_device(device)).eval()
    bundle.joint.to(resolve_device(device)).eval()
    dev = dev.sample(config.dev_captions)
    similar = dev.text_embeddings @ dev.image_embeddings.T
    pool = min(config.dev_pool, len(dev.rows))
    nearest = np.argsort(-similar, axis=1, kind="stable")[:, :pool]
    logits, late, pooled = _scores(bundle, dev, nearest, features, on_progress)
    near = np.take_along_axis(similar, nearest, axis=1)
    right = nearest == dev.owner[:, None]
    fixed = (config.embedding_weight, config.late_weight, config.pooled_weight)
    grids = [GRID if weight is None else (weight,) for weight in fixed]
    if bundle.joint.pooled is None:
        grids[2] = (0.0,)
    recall = {
        Weights(w, v, u): _recall(logits + w * near + v * late + u * pooled, right)
        for w, v, u in itertools.product(*grids)
    }
    best = max(recall.values())
    return WeightChoice(
        weights=min((weights for weights, value in recall.items() if value == best), key=sum),
        recall=recall,
        embedding_recall=_recall(near, right),
        captions=len(dev.captions),
        pool=pool,
    )


def _recall(scores: NDArray[Any], right: NDArray[np.bool_]) -> float:
    """Part of the rows whose highest score, the first of equals, is right."""
    return float(np.take_along_axis(right, scores.argmax(axis=1)[:, None], axis=1).mean())


@torch.inference_mode()
def _scores(
    bundle: ModelBundle, dev: DevSet, nearest: NDArray[np.int64], features: Features, on_progress: OnProgress
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Logits, late interaction and pooled similarity [c, pool] of captions with their nearest images.

    Of tokens that are rounded as they are stored.
    """
    adapter = trained_part(bundle.adapter)
    device = bundle.joint.text_projection.weight.device
    used, places = np.unique(nearest, return_inverse=True)
    tokens = []
    for start in range(0, len(used), _ADAPTER_BATCH):
        blocks = features.fetch(dev.rows[used[start : start + _ADAPTER_BATCH]])
        tokens.append(adapter(blocks.to(device).float()).bfloat16().cpu())
    stored = torch.cat(tokens)
    rows = places.reshape(nearest.shape)
    logits, late, pooled = [], [], []
    for done, (text, near) in enumerate(zip(dev.captions, rows, strict=True)):
        on_progress(done, len(rows))
        logits.append(bundle.joint.score(text, stored[near]).numpy())
        late.append(bundle.joint.late_interaction([text] * len(near), stored[near]).numpy(force=True))
        pooled.append(bundle.joint.pooled_similarity([text] * len(near), stored[near]).numpy(force=True))
    return np.stack(logits), np.stack(late), np.stack(pooled)
