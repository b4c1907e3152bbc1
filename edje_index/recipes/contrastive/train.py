"""Training of the heads: a loop over all captions, the best epoch on a development set kept.

The same data, seed, versions and number of threads give the same weights.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.recipes.contrastive.config import DualConfig
from edje_index.recipes.contrastive.heads import Heads
from edje_index.recipes.contrastive.objective import contrastive_loss
from edje_index.recipes.contrastive.text_features import CaptionFeatures

CUTOFFS = (1, 5, 10, 50)
WARMUP = 0.03  # of all steps
CLIP_NORM = 1.0
EVALUATION_BATCH = 512
OnRecord = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class PairFeatures:
    """Images n with their captions c, as features.

    Attributes:
        images: float32 [n, d].
        captions: of c captions.
        image_of: number of each caption's image, int64 [c].
    """

    images: torch.Tensor
    captions: CaptionFeatures
    image_of: torch.Tensor


@dataclass
class Training:
    """What a training came to.

    Attributes:
        epoch: whose weights were kept, counted from 1.
        recalls: on the development set, by direction and cut-off (``t2i`` R@1, ... in percent); empty without one.
        seconds: of the loop.
    """

    epoch: int = 0
    recalls: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0


def train_heads(
    heads: Heads, data: PairFeatures, dev: PairFeatures | None, config: DualConfig, on_record: OnRecord
) -> Training:
    """Train ``heads`` in place.

    Args:
        heads: their parameters are trained, and nothing else.
        data: to train on.
        dev: to choose the epoch by (mean of R@1 and R@10 in both directions); None keeps the last.
        config: how.
        on_record: gets one record an epoch.

    Raises:
        ModelError: fewer captions than a batch, or a loss that is not finite.
    """
    if len(data.captions) < config.batch_size:
        raise ModelError(f"{len(data.captions)} captions do not fill a batch of {config.batch_size}: make it smaller")
    started = time.monotonic()
    best, result, kept = -1.0, Training(), copy.deepcopy(heads.state_dict())
    heads.requires_grad_(True)
    heads.standardise(data.images)
    optimizer = torch.optim.AdamW(heads.groups(config.lr, config.text_lr, config.weight_decay))
    schedule = _Schedule(optimizer, config.epochs * (len(data.captions) // config.batch_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for epoch in range(1, config.epochs + 1):
            loss = _epoch(heads, data, config, schedule)
            recalls = {} if dev is None else recall(heads, dev)
            quality = _quality(recalls) if recalls else float(epoch)
            if quality > best:
                best, kept = quality, copy.deepcopy(heads.state_dict())
                result = Training(epoch, recalls)
            on_record({"epoch": epoch, "loss": loss, "seconds": time.monotonic() - started, **_flat(recalls)})
    heads.load_state_dict(kept)
    heads.requires_grad_(False)
    heads.fold()
    result.seconds = time.monotonic() - started
    return result


@torch.inference_mode()
def recall(heads: Heads, data: PairFeatures) -> dict[str, dict[str, float]]:
    """Recall in percent at CUTOFFS, text to image (``t2i``) and image to text (``i2t``: the best of its captions)."""
    images = functional.normalize(heads.image_embedding(data.images), dim=-1)
    batches = torch.split(torch.arange(len(data.captions)), EVALUATION_BATCH)
    texts = torch.cat([heads.text_embedding(data.captions.batch(batch)) for batch in batches])
    similarities = functional.normalize(texts, dim=-1) @ images.T
    own = similarities.gather(1, data.image_of[:, None])
    to_image = (similarities > own).sum(1)
    best = torch.full((len(images),), -torch.inf).scatter_reduce(0, data.image_of, own[:, 0], "amax")
    to_text = (similarities > best).sum(0)[best.isfinite()]
    ranks = {"t2i": to_image, "i2t": to_text}
    return {name: {f"R@{k}": 100 * float((rank < k).double().mean()) for k in CUTOFFS} for name, rank in ranks.items()}


def _epoch(heads: Heads, data: PairFeatures, config: DualConfig, schedule: _Schedule) -> float:
    """One pass over all captions in random order; returns the mean loss."""
    heads.train()
    losses = []
    order = torch.randperm(len(data.captions))
    size = config.batch_size
    with heads.hidden_dropout(config.image_dropout, config.text_dropout):
        for start in range(0, len(order) - size + 1, size):
            captions = order[start : start + size]
            rows = data.image_of[captions]
            images = heads.image_embedding(data.images[rows], config.image_dropout)
            texts = heads.text_embedding(data.captions.batch(captions), config.text_dropout)
            loss = contrastive_loss(images, texts, heads.log_scale, rows)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise ModelError("the loss is not finite: lower --lr")
            schedule.step(loss)
    heads.eval()
    return float(np.mean(losses))


class _Schedule:
    """Linear warm-up, then a cosine to 0; every group has its own peak."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer = optimizer
        self.steps = steps
        self.warmup = max(1, int(WARMUP * steps))
        self.done = 0

    def step(self, loss: torch.Tensor) -> None:
        factor = min(1.0, (self.done + 1) / self.warmup) * (1 + math.cos(math.pi * self.done / self.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        self.optimizer.step()
        self.done += 1


def _quality(recalls: Mapping[str, Mapping[str, float]]) -> float:
    return float(np.mean([found[key] for found in recalls.values() for key in ("R@1", "R@10")]))


def _flat(recalls: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{direction} {key}": value for direction, found in recalls.items() for key, value in found.items()}


def captions_of(counts: Sequence[int]) -> torch.Tensor:
    """Number of each caption's image, int64, from the number of captions that each image has."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
