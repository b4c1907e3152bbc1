"""Trains an open_clip model from captions and two towers, and writes the model to a folder."""

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
    """The inputs and settings of `train_embedding`.

    Attributes:
        train: captions to train on.
        dev: captions of the development set. The epoch with the best recall on this set is kept. If the set is empty,
            the last epoch is kept.
        sources: the two towers to start from.
        config: training settings.
        out: new folder for the model and the log ``training.jsonl``. Other functions open the model by the name
            ``local-dir:OUT``.
        cache: folder for image features. If a run is interrupted, the next run reuses these features.
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
        out: folder of the model.
        images: number of training images that could be read.
        unreadable: number of training images that could not be read.
        training: result of the training loop.
    """

    out: Path
    images: int
    unreadable: int
    training: HeadTraining


def train_embedding(
    request: EmbeddingRequest, on_progress: OnProgress, on_epoch: Callable[[Mapping[str, Any]], None]
) -> TrainedEmbedding:
    """Train an embedding model, and write the model to a new folder.

    Args:
        request: captions, towers, settings and output folder.
        on_progress: called after each batch of features.
        on_epoch: called after each epoch with the log record of the epoch.

    Raises:
        ModelError: a tower is missing or not supported, no image can be read, ``request.out`` exists, the captions do
            not fill a batch, or the loss is not finite.
        UsageError: an image is inside a tar file, or ``tune_text`` exceeds the number of layers of the text tower.
    """
    if request.out.exists():
        raise ModelError(f"{request.out} exists already: give another path, or remove {request.out}")
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
        raise UsageError(f"tune_text is {tune_text}, but the text tower has only {layers} layers; lower tune_text")


def _pair_features(
    model: ContrastiveModel, items: Sequence[CaptionedImage], request: EmbeddingRequest, on_progress: OnProgress
) -> tuple[PairFeatures, int]:
    """Return the features of all pairs with a readable image, and the number of unreadable images."""
    paths = [_plain_file(item) for item in items]
    images = image_features(PooledTower(model.clip.visual.trunk, model.config), paths, request.cache, on_progress)
    readable = np.asarray(np.isfinite(images).all(axis=1))
    kept = [item for item, is_readable in zip(items, readable, strict=True) if is_readable]
    if not kept:
        raise ModelError(
            f"none of the {len(items)} images can be read, for example {paths[0]}: correct the base "
            "directory of the image paths"
        )
    captions = [caption for item in kept for caption in item.captions]
    tower = FrozenTextTower(model.clip.text, model.tokenizer, request.config.tune_text)
    features = caption_features(tower, captions, on_progress)
    image_of = captions_of([len(item.captions) for item in kept])
    return PairFeatures(torch.from_numpy(images[readable]), features, image_of), int((~readable).sum())


def _plain_file(item: CaptionedImage) -> Path:
    if TAR_MEMBER_MARK in item.path:
        raise UsageError(f"{item.path} is inside a tar file, which is not supported here: extract the images first")
    return Path(item.path)
