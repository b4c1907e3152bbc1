"""Trains an embedding model from an image tower and a text tower that were trained
separately.

This is useful if no CLIP weights can be downloaded. Both towers are frozen, so their
features are computed once. A head on each tower is trained with a contrastive loss. The
result is an open_clip model.

Shape letters: n images, c captions, b pairs, d width of a tower, e width of the
embedding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edje_index.bundles.shipped_model import IMAGE_TOWER, TEXT_TOWER
from edje_index.captions.reading import CaptionedImage
from edje_index.errors import ModelError
from edje_index.evaluation.recall import ranks_by_similarity
from edje_index.images.decode import decode_rgb
from edje_index.images.preprocessing import Preprocessor, normalize
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import HF_TEXT_FOLDER, WEIGHTS_FILE, ClipConfig
from edje_index.models.clip_model import build_clip
from edje_index.models.filesystem import new_folder, write_json
from edje_index.models.text_tower import save_text_tokenizer, text_tokenizer
from edje_index.models.weights import assign_weights, read_weights, save_weights
from edje_index.training.step import alignment_loss

prepare_torchvision()

import timm  # noqa: E402
from timm.models.vision_transformer import checkpoint_filter_fn  # noqa: E402

IMAGE_NAME = "vit_small_patch14_dinov2"
IMAGE_SIZE = 224
TOWER_WEIGHTS = "model.safetensors"
# tokens per text; longer texts are truncated
CONTEXT_LENGTH = 64
CUTOFFS = (1, 10)
WEIGHT_DECAY = 0.5
# largest value of 1 / temperature, as in CLIP
MAX_SCALE = 100.0
IMAGE_BATCH = 32
TEXT_BATCH = 128


@dataclass
class EmbeddingModel:
    """An open_clip model with a timm image tower and a Hugging Face text tower."""

    clip: Any
    config: ClipConfig
    tokenizer: Any
    # fields of the text tower's config.json
    text_config: dict[str, Any]

    def save(self, out: Path) -> None:
        """Write the model to the new folder ``out``. ``load_clip("local-dir:OUT")``
        loads the model.
        """
        with new_folder(out) as folder:
            self.config.write(folder)
            save_weights(self.clip, folder / WEIGHTS_FILE)
            save_text_tokenizer(self.tokenizer, folder)
            (folder / HF_TEXT_FOLDER).mkdir()
            write_json(folder / HF_TEXT_FOLDER / "config.json", self.text_config)


@dataclass(frozen=True)
class PairFeatures:
    """Features of n images [n, d] and their c captions [c, d], and the index of the
    image of each caption [c].
    """

    images: torch.Tensor
    captions: torch.Tensor
    image_of: torch.Tensor


def start_model(
    towers: Path,
    *,
    embed_dim: int = 512,
    image_name: str = IMAGE_NAME,
    image_size: int = IMAGE_SIZE,
) -> EmbeddingModel:
    """Build the initial model of a training run. Its towers have the weights in the
    folder `towers`, and its heads have random weights.
    """
    text = towers / TEXT_TOWER
    vision_config = {
        "image_size": image_size,
        "timm_model_name": image_name,
        "timm_model_pretrained": False,
        "timm_pool": "token",
        "timm_proj": "mlp",
        "timm_proj_bias": True,
    }
    text_config = {
        "context_length": CONTEXT_LENGTH,
        "hf_model_name": text.name,
        "hf_model_pretrained": False,
        "hf_tokenizer_name": text.name,
        "hf_pooler_type": "mean_pooler",
        "hf_proj_type": "mlp",
    }
    pretrained: Any = timm.get_pretrained_cfg(image_name)
    preprocess = {
        "size": [image_size, image_size],
        "mode": "RGB",
        "mean": list(pretrained.mean),
        "std": list(pretrained.std),
        "interpolation": "bicubic",
        "resize_mode": "shortest",
        "fill_color": 0,
    }
    model_config = {
        "embed_dim": embed_dim,
        "vision_cfg": vision_config,
        "text_cfg": text_config,
    }
    config = ClipConfig(f"{image_name}-{text.name}", model_config, preprocess)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip: Any = build_clip(config, text)
    image_weights = {
        name: tensor.float()
        for name, tensor in read_weights(towers / IMAGE_TOWER / TOWER_WEIGHTS).items()
    }
    assign_weights(
        clip.visual.trunk,
        checkpoint_filter_fn(image_weights, clip.visual.trunk),
        str(towers / IMAGE_TOWER),
    )
    unused = ("pooler.", "embeddings.position_ids")
    weights = read_weights(text / TOWER_WEIGHTS).items()
    text_weights = {
        name: tensor.float() for name, tensor in weights if not name.startswith(unused)
    }
    assign_weights(clip.text.transformer, text_weights, str(text))
    fields = json.loads((text / "config.json").read_text())
    return EmbeddingModel(clip, config, text_tokenizer(config, text), fields)


@torch.no_grad()
def pair_features(
    model: EmbeddingModel, items: Sequence[CaptionedImage]
) -> PairFeatures:
    """Return the features of images and captions, computed with the frozen towers."""
    prepare = Preprocessor(model.config)
    images = []
    for start in range(0, len(items), IMAGE_BATCH):
        print(f"image features: {start} of {len(items)}", end="\r", flush=True)
        paths = [Path(item.path) for item in items[start : start + IMAGE_BATCH]]
        pixels = [prepare(decode_rgb(path.read_bytes())) for path in paths]
        batch = normalize(torch.stack(pixels), prepare.scale)
        images.append(model.clip.visual.trunk(batch))
    ids = model.tokenizer([caption for item in items for caption in item.captions])
    pad = model.text_config["pad_token_id"]
    lengths = (ids != pad).sum(dim=1)
    # The features of a caption are the mean of its last hidden states.
    captions = torch.zeros(len(ids), model.text_config["hidden_size"])
    # The captions of a batch have similar lengths, so that there is little padding.
    for rows in torch.split(lengths.argsort(stable=True), TEXT_BATCH):
        batch = ids[rows, : int(lengths[rows].max())]
        mask = batch != pad
        hidden = model.clip.text.transformer(
            input_ids=batch, attention_mask=mask.long()
        ).last_hidden_state
        captions[rows] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    counts = torch.tensor([len(item.captions) for item in items])
    return PairFeatures(
        torch.cat(images), captions, torch.arange(len(items)).repeat_interleave(counts)
    )


def train_heads(
    clip: Any,
    data: PairFeatures,
    dev: PairFeatures,
    *,
    epochs: int = 14,
    batch_size: int = 512,
    lr: float = 1e-3,
    dropout: float = 0.3,
) -> dict[str, float]:
    """Train the heads of `clip` in place, and keep the weights of the epoch with the
    highest mean of R@1 and R@10 on `dev`.

    docs/lab/training.md says how the defaults were chosen. The learning rate rises over
    the first 3 % of the steps to `lr`, and then falls along a cosine to 0. Biases,
    norms and the temperature have no weight decay. Dropout is applied to the input
    features and to the hidden activations of both heads.

    Returns:
        The recall of the epoch that was kept, see `recall`.

    Raises:
        ModelError: `data` has fewer captions than a batch, or the loss is not finite.
    """
    if len(data.captions) < batch_size:
        raise ModelError(
            f"{len(data.captions)} captions do not fill a batch of {batch_size}"
        )
    image_head = clip.visual.head
    text_head = clip.text.proj
    log_scale = clip.logit_scale
    heads = nn.ModuleList([image_head, text_head])
    parameters = [*heads.parameters(), log_scale]
    # Image features are standardised for the training. After the training, the first
    # layer of the image head is changed so that it accepts the original features.
    mean = data.images.mean(0)
    std = data.images.std(0).clamp(min=1e-3)
    data, dev = (
        replace(part, images=(part.images - mean) / std) for part in (data, dev)
    )
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    steps = epochs * (len(data.captions) // batch_size)
    warmup = max(1, int(0.03 * steps))

    def rate(step: int) -> float:
        return (
            min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def drop(values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values, dropout, heads.training)

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: drop(output))
        for module in heads.modules()
        if isinstance(module, nn.GELU)
    ]
    best_state = list[torch.Tensor]()
    best_recalls = dict[str, float]()
    for parameter in parameters:
        parameter.requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for epoch in range(1, epochs + 1):
            heads.train()
            losses = []
            for pairs in torch.split(torch.randperm(len(data.captions)), batch_size):
                if len(pairs) < batch_size:
                    continue
                rows = data.image_of[pairs]
                images = image_head(drop(data.images[rows]))
                loss = contrastive_loss(
                    images, text_head(drop(data.captions[pairs])), log_scale, rows
                )
                losses.append(float(loss.detach()))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
            heads.eval()
            recalls = recall(image_head, text_head, dev)
            print(f"epoch {epoch}: loss {np.mean(losses):.3f}, recall {recalls}")
            if not np.isfinite(losses).all():
                raise ModelError("the loss is not finite; lower the learning rate")
            if not best_recalls or sum(recalls.values()) > sum(best_recalls.values()):
                best_recalls = recalls
                best_state = [parameter.detach().clone() for parameter in parameters]
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for parameter, value in zip(parameters, best_state, strict=True):
            parameter.requires_grad_(False).copy_(value)
        first = image_head.mlp.fc1
        first.weight.div_(std)
        first.bias.sub_(first.weight @ mean)
    return best_recalls


def contrastive_loss(
    images: torch.Tensor,
    texts: torch.Tensor,
    log_scale: torch.Tensor,
    image_ids: torch.Tensor,
) -> torch.Tensor:
    """Return the symmetric InfoNCE loss of a batch of pairs. Pairs of the same image
    are not negatives of each other.

    Args:
        images, texts: embeddings [b, e], which this function normalises.
        log_scale: log(1 / temperature), a scalar.
        image_ids: number of the image of each pair, int64 [b].
    """
    similarities = (
        functional.normalize(images, dim=-1) @ functional.normalize(texts, dim=-1).T
    )
    same = image_ids[:, None] == image_ids[None]
    same.fill_diagonal_(False)
    logits = log_scale.exp().clamp(max=MAX_SCALE) * similarities
    return alignment_loss(logits.masked_fill(same, -torch.inf), torch.tensor(1.0))


@torch.inference_mode()
def recall(
    image_head: nn.Module, text_head: nn.Module, data: PairFeatures
) -> dict[str, float]:
    """Return the recalls in percent, for example ``t2i R@1``, by direction and
    cut-off.
    """
    images = functional.normalize(image_head(data.images), dim=-1)
    texts = functional.normalize(text_head(data.captions), dim=-1)
    similarities = (texts @ images.T).numpy()
    relevant = data.image_of[:, None].numpy() == np.arange(len(images))
    ranks = {
        "t2i": ranks_by_similarity(similarities, relevant),
        "i2t": ranks_by_similarity(similarities.T, relevant.T),
    }
    return {
        f"{name} R@{k}": 100 * float((rank < k).mean())
        for name, rank in ranks.items()
        for k in CUTOFFS
    }
