"""``train_embedding``: from captions and two towers to an open_clip model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edje_index.captions.reading import CaptionedImage
from edje_index.errors import ModelError
from edje_index.progress import OnProgress
from edje_index.recipes.contrastive.config import ContrastiveConfig, TowerSources
from edje_index.recipes.contrastive.heads import Heads
from edje_index.recipes.contrastive.image_features import PooledTower, image_features
from edje_index.recipes.contrastive.text_features import FrozenTextTower, caption_features
from edje_index.recipes.contrastive.towers import ContrastiveModel, start_model
from edje_index.recipes.contrastive.train import HeadTraining, PairFeatures, captions_of, train_heads
from storage_formats.errors import UsageError

LOG = "training.jsonl"
TAR_MEMBER_MARK = ".tar!"


@dataclass(frozen=True)
class EmbeddingRequest:
    """What to train an embedding model from, and where to write it.

    Attributes:
        train: captions to train on.
        dev: captions to choose the epoch by; if empty, the last epoch is kept.
        sources: the two towers.
        config: how to train.
        out: new folder; ``local-dir:OUT`` opens it. It also holds ``training.jsonl``.
        cache: folder for image features; an interrupted pass resumes from it.
    """

    train: Sequence[CaptionedImage]
    dev: Sequence[CaptionedImage]
    sources: TowerSources
    config: ContrastiveConfig
    out: Path
    cache: Path


@dataclass(frozen=True)
class TrainedEmbedding:
    """A trained embedding model.

    Attributes:
        out: its folder.
        images: number of images trained on.
        unreadable: number of images left out because they could not be read.
        training: epoch kept, recalls on the development set, seconds.
    """

    out: Path
    images: int
    unreadable: int
    training: HeadTraining


def train_embedding(
    request: EmbeddingRequest, on_progress: OnProgress, on_epoch: Callable[[Mapping[str, Any]], None]
) -> TrainedEmbedding:
    """Train the heads of an embedding model and write it as a new folder.

    Args:
        request: what to train from, how, and where to write the result.
        on_progress: called while features are computed.
        on_epoch: called with one record per epoch.

    Raises:
        ModelError: a tower is missing or of another kind, no image can be read, or ``request.out`` exists.
        UsageError: an image lies inside a tar file, or more layers are to be tuned than the text tower has.
    """
    if request.out.exists():
        raise ModelError(f"{request.out} exists already: give another folder, or remove it")
    config = request.config
    model = start_model(request.sources, config.embed_dim, config.seed)
    _check_tuned_layers(model, config.tune_text)
    train_pairs, unreadable = _pair_features(model, request.train, request, on_progress)
    dev_pairs = _pair_features(model, request.dev, request, on_progress)[0] if request.dev else None
    records: list[Mapping[str, Any]] = [{**asdict(config), "images": len(train_pairs.images)}]

    def on_record(record: Mapping[str, Any]) -> None:
        records.append(dict(record))
        on_epoch(record)

    training = train_heads(
        Heads(model.clip, config.tune_text), train_pairs, dev=dev_pairs, config=config, on_record=on_record
    )
    model.save(request.out)
    (request.out / LOG).write_text("".join(json.dumps(record) + "\n" for record in records))
    return TrainedEmbedding(request.out, len(train_pairs.images), unreadable, training)


def _check_tuned_layers(model: ContrastiveModel, tune_text: int) -> None:
    layers = int(model.text_config["num_hidden_layers"])
    if tune_text > layers:
        raise UsageError(f"cannot tune {tune_text} layers: the text tower has {layers}")


def _pair_features(
    model: ContrastiveModel, items: Sequence[CaptionedImage], request: EmbeddingRequest, on_progress: OnProgress
) -> tuple[PairFeatures, int]:
    """Features of the images that can be read and of their captions; and the number of unreadable images."""
    paths = [_plain_file(item) for item in items]
    images = image_features(PooledTower(model.clip.visual.trunk, model.config), paths, request.cache, on_progress)
    readable = np.asarray(np.isfinite(images).all(axis=1))
    kept = [item for item, is_readable in zip(items, readable, strict=True) if is_readable]
    if not kept:
        raise ModelError(f"none of the {len(items)} images can be read, for example {paths[0]}: check their folder")
    captions = [caption for item in kept for caption in item.captions]
    tower = FrozenTextTower(model.clip.text, model.tokenizer, request.config.tune_text)
    features = caption_features(tower, captions, on_progress)
    image_of = captions_of([len(item.captions) for item in kept])
    return PairFeatures(torch.from_numpy(images[readable]), features, image_of), int((~readable).sum())


def _plain_file(item: CaptionedImage) -> Path:
    if TAR_MEMBER_MARK in str(item.path):
        raise UsageError(f"{item.path} lies inside a tar file, which is not read here; extract the images first")
    return item.path
