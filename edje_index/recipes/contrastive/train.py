"""Trains the heads, and keeps the weights of the epoch with the best recall."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.recipes.contrastive.config import ContrastiveConfig
from edje_index.recipes.contrastive.heads import Heads
from edje_index.recipes.contrastive.objective import contrastive_loss
from edje_index.recipes.contrastive.text_features import CaptionFeatures

CUTOFFS = (1, 5, 10, 50)
WARMUP = 0.03  # share of all steps
CLIP_NORM = 1.0
EVALUATION_BATCH = 512
OnRecord = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class PairFeatures:
    """Features of n images and c captions.

    Attributes:
        images: features of the images, float32 [n, d].
        captions: features of the captions.
        image_of: index of the image of each caption, int64 [c].
    """

    images: torch.Tensor
    captions: CaptionFeatures
    image_of: torch.Tensor


@dataclass(frozen=True)
class HeadTraining:
    """The result of a training run.

    Attributes:
        epoch: number of the epoch that was kept, counted from 1.
        recalls: recall on the development set in percent, by direction (``t2i``, ``i2t``) and cut-off (``R@1``, ...);
            empty if there is no development set.
        seconds: duration of the training loop in seconds.
    """

    epoch: int
    recalls: dict[str, dict[str, float]]
    seconds: float


def train_heads(
    heads: Heads, data: PairFeatures, *, dev: PairFeatures | None, config: ContrastiveConfig, on_record: OnRecord
) -> HeadTraining:
    """Train ``heads`` in place, and keep the weights of one epoch.

    Args:
        heads: parameters to train.
        data: features of the training set.
        dev: features of the development set. The epoch with the highest mean of four recalls on this set is kept: R@1
            and R@10 in both directions. None keeps the last epoch.
        config: training settings.
        on_record: called after each epoch with the log record of the epoch.

    Raises:
        ModelError: there are fewer captions than ``batch_size``, or the loss is not finite.
    """
    if len(data.captions) < config.batch_size:
        raise ModelError(f"{len(data.captions)} captions do not fill a batch of {config.batch_size}; lower batch_size")
    started = time.monotonic()
    best_quality, best_epoch, best_recalls = -1.0, 0, dict[str, dict[str, float]]()
    best_state = copy.deepcopy(heads.state_dict())
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
            if quality > best_quality:
                best_quality, best_epoch, best_recalls = quality, epoch, recalls
                best_state = copy.deepcopy(heads.state_dict())
            on_record({"epoch": epoch, "loss": loss, "seconds": time.monotonic() - started, **_flat(recalls)})
    heads.load_state_dict(best_state)
    heads.requires_grad_(False)
    heads.fold()
    return HeadTraining(best_epoch, best_recalls, time.monotonic() - started)


@torch.inference_mode()
def recall(heads: Heads, data: PairFeatures) -> dict[str, dict[str, float]]:
    """Return the recall in percent, by direction (``t2i``, ``i2t``) and cut-off (``R@1``, ...)."""
    images = functional.normalize(heads.image_embedding(data.images), dim=-1)
    batches = torch.split(torch.arange(len(data.captions)), EVALUATION_BATCH)
    texts = torch.cat([heads.text_embedding(data.captions.batch(batch)) for batch in batches])
    similarities = functional.normalize(texts, dim=-1) @ images.T
    positives = similarities.gather(1, data.image_of[:, None])
    image_ranks = (similarities > positives).sum(1)
    best = torch.full((len(images),), -torch.inf).scatter_reduce(0, data.image_of, positives[:, 0], "amax")
    caption_ranks = (similarities > best).sum(0)[best.isfinite()]
    ranks = {"t2i": image_ranks, "i2t": caption_ranks}
    return {name: {f"R@{k}": 100 * float((rank < k).double().mean()) for k in CUTOFFS} for name, rank in ranks.items()}


def _epoch(heads: Heads, data: PairFeatures, config: ContrastiveConfig, schedule: _Schedule) -> float:
    """Train on all captions once, and return the mean loss. An incomplete last batch is left out."""
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
                raise ModelError(f"the loss is {losses[-1]}, which is not finite; lower the learning rate")
            schedule.step(loss)
    heads.eval()
    return float(np.mean(losses))


class _Schedule:
    """Learning-rate schedule: linear warm-up to the peak learning rate, then cosine decay to 0."""

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
    return float(np.mean([by_cutoff[key] for by_cutoff in recalls.values() for key in ("R@1", "R@10")]))


def _flat(recalls: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{direction} {key}": value for direction, by_cutoff in recalls.items() for key, value in by_cutoff.items()}


def captions_of(counts: Sequence[int]) -> torch.Tensor:
    """Return the index of the image of each caption, int64 [c].

    Args:
        counts: number of captions of each image.
    """
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
