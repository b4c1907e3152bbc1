"""What decides a dual encoder and its training. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from storage_formats.errors import UsageError


@dataclass(frozen=True)
class DualSources:
    """Towers to start from.

    Attributes:
        image_name: timm's name of a vision transformer.
        image_weights: its weights under timm's names, of any image size.
        text: folder of a Hugging Face BERT with its tokenizer.
        image_size: side of the square picture in pixels.
    """

    image_name: str
    image_weights: Path
    text: Path
    image_size: int = 224


@dataclass(frozen=True)
class DualConfig:
    """How the heads are trained. The defaults were chosen on a development split of Flickr8k.

    Attributes:
        embed_dim: width of the common embedding.
        epochs: passes over all captions.
        batch_size: pairs of a step, each against all others.
        lr: AdamW's learning rate at its peak; 3 % of the steps warm up to it, then a cosine falls to 0.
        text_lr: the same for tuned layers of the text tower.
        weight_decay: AdamW's; not of biases, norms and the temperature.
        image_dropout: of the image features and the hidden layer of the image head.
        text_dropout: the same on the side of the text.
        tune_text: layers of the text tower that are trained, from the top; 0 leaves it frozen.
        seed: decides everything random.
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
        if min(self.embed_dim, self.epochs) < 1 or self.batch_size < 2 or min(self.tune_text, self.seed) < 0:
            raise UsageError("embedding width and epochs are at least 1, a batch 2, tuned layers and seed 0")
        if not (0 <= self.image_dropout < 1 and 0 <= self.text_dropout < 1):
            raise UsageError("dropout lies between 0 and 1")
        if min(self.lr, self.text_lr) <= 0 or self.weight_decay < 0:
            raise UsageError("learning rates are positive, weight decay is not negative")
