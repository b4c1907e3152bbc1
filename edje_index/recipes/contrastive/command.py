"""``train_embedding``: captions and two towers in, an open_clip model folder out."""

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
from edje_index.recipes.contrastive.config import DualConfig, DualSources
from edje_index.recipes.contrastive.heads import Heads
from edje_index.recipes.contrastive.image_features import PooledTower, image_features
from edje_index.recipes.contrastive.text_features import caption_features
from edje_index.recipes.contrastive.towers import DualModel, start_model
from edje_index.recipes.contrastive.train import PairFeatures, Training, captions_of, train_heads
from storage_formats.errors import UsageError

LOG = "training.jsonl"
MEMBER_MARK = "!"


@dataclass(frozen=True)
class Reports:
    """Where news of a run goes.

    Attributes:
        progress: (what, done, all) while features are made.
        record: one mapping an epoch.
    """

    progress: Callable[[str, int, int], None]
    record: Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class DualResult:
    """A trained dual encoder.

    Attributes:
        out: its folder.
        images: trained on.
        unreadable: images that could not be read and were left out.
        training: epoch kept, recalls on the development set, seconds.
    """

    out: Path
    images: int
    unreadable: int
    training: Training


def train_embedding(
    data: Sequence[CaptionedImage],
    dev: Sequence[CaptionedImage],
    sources: DualSources,
    config: DualConfig,
    out: Path,
    cache: Path,
    reports: Reports,
) -> DualResult:
    """Train the heads of a dual encoder and write it as the new folder ``out``.

    Args:
        data: captions to train on.
        dev: captions to choose the epoch by; none keeps the last.
        sources: the towers.
        config: how to train.
        out: new folder; ``local-dir:OUT`` opens it. Beside the model it holds ``training.jsonl``.
        cache: folder for image features; a pass that was interrupted goes on there.
        reports: where news goes.

    Raises:
        ModelError: towers that are not there or do not fit, nothing to train on, ``out`` exists.
        UsageError: images inside tar files.
    """
    if out.exists():
        raise ModelError(f"{out} exists already: give another folder, or remove it")
    model = start_model(sources, config.embed_dim, config.seed)
    layers = int(model.text_config["num_hidden_layers"])
    if config.tune_text > layers:
        raise UsageError(f"cannot tune {config.tune_text} layers: the text tower has {layers}")
    train_pairs, unreadable = _pairs(model, data, config, cache, reports)
    dev_pairs = _pairs(model, dev, config, cache, reports)[0] if dev else None
    records: list[dict[str, Any]] = [{**asdict(config), "images": len(train_pairs.images)}]

    def on_record(record: Mapping[str, Any]) -> None:
        records.append(dict(record))
        reports.record(record)

    training = train_heads(Heads(model.clip, config.tune_text), train_pairs, dev_pairs, config, on_record)
    model.save(out)
    (out / LOG).write_text("".join(json.dumps(record) + "\n" for record in records))
    return DualResult(out, len(train_pairs.images), unreadable, training)


def _pairs(
    model: DualModel, items: Sequence[CaptionedImage], config: DualConfig, cache: Path, reports: Reports
) -> tuple[PairFeatures, int]:
    """Features of what can be read, and the number of images that cannot."""
    paths = [_plain_file(item) for item in items]
    tower = PooledTower(model.clip.visual.trunk, model.config)
    images = image_features(tower, paths, cache, lambda done, of: reports.progress("images", done, of))
    sound = np.asarray(np.isfinite(images).all(axis=1))
    kept = [item for item, fine in zip(items, sound, strict=True) if fine]
    if not kept:
        raise ModelError(f"none of the {len(items)} images can be read: say where they are (--images)")
    captions = [caption for item in kept for caption in item.captions]
    features = caption_features(
        model.clip.text,
        model.tokenizer,
        captions,
        config.tune_text,
        lambda done, of: reports.progress("captions", done, of),
    )
    counts = [len(item.captions) for item in kept]
    return PairFeatures(torch.from_numpy(images[sound]), features, captions_of(counts)), int((~sound).sum())


def _plain_file(item: CaptionedImage) -> Path:
    if f".tar{MEMBER_MARK}" in str(item.path):
        raise UsageError(f"{item.path}: images inside tar files are not read here; extract them and give --images")
    return item.path
