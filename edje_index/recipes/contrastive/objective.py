"""The contrastive loss: symmetric InfoNCE. Captions of the same image are not negatives of each other."""

from __future__ import annotations

import torch
from torch.nn import functional

MAX_SCALE = 100.0  # upper bound of 1 / temperature, as in CLIP


def contrastive_loss(
    images: torch.Tensor, texts: torch.Tensor, log_scale: torch.Tensor, image_ids: torch.Tensor
) -> torch.Tensor:
    """Return the mean of the image-to-text and text-to-image cross-entropies over a batch of pairs, a scalar.

    Args:
        images: embedding of the image of each pair [b, e]; the function normalises it.
        texts: embedding of the caption of each pair [b, e]; the function normalises it.
        log_scale: log(1 / temperature), a scalar.
        image_ids: id of the image of each pair, int64 [b]. Other pairs of the same image are not negatives.
    """
    similarities = functional.normalize(images, dim=-1) @ functional.normalize(texts, dim=-1).T
    logits = log_scale.exp().clamp(max=MAX_SCALE) * similarities
    same = image_ids[:, None] == image_ids[None]
    same.fill_diagonal_(False)
    logits = logits.masked_fill(same, -torch.inf)
    target = torch.arange(len(image_ids), device=logits.device)
    return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2
