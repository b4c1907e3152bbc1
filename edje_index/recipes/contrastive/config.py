"""The settings of a contrastive training run. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from storage_formats.errors import UsageError


@dataclass(frozen=True)
class TowerSources:
    """The two towers that training starts from.

    Attributes:
        image_name: name of a vision transformer in timm.
        image_weights: file with the weights of the image tower, with timm's tensor names. The weights may be for
            another image size.
        text: folder of a Hugging Face BERT model and its tokenizer.
        image_size: height and width of the input images in pixels.
    """

    image_name: str
    image_weights: Path
    text: Path
    image_size: int = 224


@dataclass(frozen=True)
class ContrastiveConfig:
    """Settings of a contrastive training run. docs/lab/models.md explains the defaults.

    Attributes:
        embed_dim: width of the shared embedding.
        epochs: passes over all captions.
        batch_size: number of caption-image pairs per step. Pairs of different images are negatives of each other.
        lr: peak learning rate of the heads. After a linear warm-up over 3 % of the steps, a cosine decay to 0 follows.
        text_lr: peak learning rate of the trained layers of the text tower.
        weight_decay: weight decay of AdamW. Biases, norms and the temperature have no weight decay.
        image_dropout: dropout probability in the image head.
        text_dropout: dropout probability in the text head.
        tune_text: number of layers of the text tower to train, counted from the output; 0 freezes the text tower.
        seed: seed of all random numbers.
    """

    embed_dim: int = 512
    epochs: int = 14
    batch_size: int = 512
    lr: float = 1e-3
    text_lr: float = 1e-4
    weight_decay: float = 0.5
    image_dropout: float = 0.3
    text_dropout: float = 0.3
    tune_text: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        minima = {"embed_dim": 1, "epochs": 1, "batch_size": 2, "tune_text": 0, "seed": 0, "weight_decay": 0}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        for name in ("image_dropout", "text_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("lr", "text_lr"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")
