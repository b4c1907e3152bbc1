"""Choosing what is added to the matching logit, on captions that were not trained on.

Re-ranking sorts by logit + v x late interaction + u x pooled similarity + w x embedding similarity (ALBEF and BLIP add
the last), less what a query bank takes off; trained logits have no scale of their own, so that all weights are fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.devices import resolve_device
from edje_index.models.text_tower import TextTower
from edje_index.training.config import FittingConfig
from edje_index.training.data.batches import Features
from edje_index.training.data.dataset import CaptionSet, image_embeddings
from edje_index.training.data.sampling import DEV, stream
from edje_index.training.fitting.likelihood import BankProducts, Scores
from edje_index.training.fitting.weight_choice import Candidates, WeightChoice, choose
from edje_index.training.model.objectives import trained_part

_ADAPTER_BATCH = 32

OnProgress = Callable[[int, int], None]
"""Called with queries done and their number."""


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


@dataclass(frozen=True)
class WeightChoices:
    """Of both directions: captions that ask for images, and images that ask for captions."""

    images: WeightChoice
    captions: WeightChoice


def make_dev_set(items: CaptionSet, tower: TextTower, features: Path) -> DevSet:
    """Captions with their embeddings and those of their images, which are in the index `features`."""
    owner = np.repeat(np.arange(len(items.rows)), [len(group) for group in items.captions])
    return DevSet(items.rows, items.texts(), owner, image_embeddings(features, items.rows), tower.encode(items.texts()))


def choose_weights(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    config: FittingConfig,
    device: str,
    on_progress: OnProgress = lambda done, total: None,
) -> WeightChoices:
    """The weights that `config` leaves open, by maximum likelihood; leaves the model on `device`."""
    bundle.adapter.to(resolve_device(device)).eval()
    bundle.joint.to(resolve_device(device)).eval()
    given = (config.embedding_weight, config.late_weight, config.pooled_weight if bundle.joint.pooled else 0.0)
    captions = np.sort(stream(0, DEV, 0).permutation(len(dev.captions))[: config.dev_captions])
    images = np.sort(stream(0, DEV, 1).permutation(len(dev.rows))[: config.dev_captions])
    total = len(captions) + len(images)

    similar = dev.text_embeddings[captions] @ dev.image_embeddings.T
    near = _nearest(similar, config.dev_pool)
    texts = np.repeat(captions[:, None], near.shape[1], axis=1)
    tokens = _Tokens.of(bundle, features, dev, near)
    of_images = Candidates(
        np.take_along_axis(similar, near, axis=1),
        *_parts(bundle, dev, tokens, (texts, near), lambda done: on_progress(done, total)),
        right=near == dev.owner[texts],
        images=dev.rows[dev.owner[captions]],
        bank=_of_bank_captions(bundle, dev, tokens, near),
    )
    chosen = choose(of_images, given, lambda: on_progress(len(captions), total))

    similar = dev.image_embeddings[images] @ dev.text_embeddings.T
    near = _nearest(similar, config.dev_pool)
    shown = np.repeat(images[:, None], near.shape[1], axis=1)
    tokens = _Tokens.of(bundle, features, dev, images)
    of_captions = Candidates(
        np.take_along_axis(similar, near, axis=1),
        *_parts(bundle, dev, tokens, (near, shown), lambda done: on_progress(len(captions) + done, total)),
        right=dev.owner[near] == shown,
        images=dev.rows[images],
        bank=_of_bank_images(bundle, dev, near),
    )
    return WeightChoices(chosen, choose(of_captions, given, lambda: on_progress(total, total)))


@dataclass(frozen=True)
class _Tokens:
    """Tokens of some images of a dev set, rounded as they are stored.

    Attributes:
        images: ascending places in the dev set, int64 [n].
        stored: bfloat16 [n, m, d].
    """

    images: NDArray[np.int64]
    stored: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, bundle: ModelBundle, features: Features, dev: DevSet, places: NDArray[np.int64]) -> _Tokens:
        adapter = trained_part(bundle.adapter)
        device = bundle.joint.text_projection.weight.device
        images, parts = np.unique(places), []
        for start in range(0, len(images), _ADAPTER_BATCH):
            blocks = features.fetch(dev.rows[images[start : start + _ADAPTER_BATCH]])
            parts.append(adapter(blocks.to(device).float()).bfloat16().cpu())
        return cls(images, torch.cat(parts))

    def at(self, places: NDArray[np.int64]) -> torch.Tensor:
        """Of images by their places in the dev set."""
        return self.stored[torch.from_numpy(np.searchsorted(self.images, places))]


def _nearest(similarities: NDArray[np.float32], pool: int) -> NDArray[np.int64]:
    """Places of the at most `pool` highest in each row [q, n], highest first, of equals the first."""
    return np.argsort(-similarities, axis=1, kind="stable")[:, :pool]


def _parts(
    bundle: ModelBundle,
    dev: DevSet,
    tokens: _Tokens,
    pairs: tuple[NDArray[np.int64], NDArray[np.int64]],
    on_query: Callable[[int], None],
) -> tuple[Scores, Scores, Scores]:
    """Logits, late interaction and pooled similarity [q, p] of captions and images [q, p], places in the dev set."""
    found = []
    for done, (texts, rows) in enumerate(zip(*pairs, strict=True)):
        on_query(done)
        found.append(bundle.joint.parts([dev.captions[at] for at in texts], tokens.at(rows), late=True, pooled=True))
    logits, late, pooled = (np.stack([part.numpy() for part in column]) for column in zip(*found, strict=True))
    return logits, late, pooled


def _of_bank_captions(
    bundle: ModelBundle, dev: DevSet, tokens: _Tokens, near: NDArray[np.int64]
) -> BankProducts | None:
    """Products of the bank's captions with images [q, p]; None without a bank."""
    if (bank := bundle.bank) is None:
        return None
    used, which = np.unique(near, return_inverse=True)
    vectors = bundle.joint.image_vectors(tokens.at(used))
    embeddings = torch.from_numpy(dev.image_embeddings[used]).to(vectors.device)
    products, places = bank.caption_products(embeddings, vectors), which.reshape(near.shape)
    return BankProducts(*products, places, lambda weights: bank.floor(weights, images=True))


def _of_bank_images(bundle: ModelBundle, dev: DevSet, near: NDArray[np.int64]) -> BankProducts | None:
    """Products of the bank's images with captions [q, p]; None without a bank."""
    if (bank := bundle.bank) is None:
        return None
    used, which = np.unique(near, return_inverse=True)
    vectors = bundle.joint.caption_vectors([dev.captions[at] for at in used])
    embeddings = torch.from_numpy(dev.text_embeddings[used]).to(vectors.device)
    products, places = bank.image_products(embeddings, vectors), which.reshape(near.shape)
    return BankProducts(*products, places, lambda weights: bank.floor(weights, images=False))
