"""The losses, each a pure function of tensors; the paper's section "Effective Discriminative Training".

Shape letters: b pairs of a batch, k negatives, t tokens of a row, m image tokens, w words of a caption, d width.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def itm_loss(positive: torch.Tensor, negative_images: torch.Tensor, negative_texts: torch.Tensor) -> torch.Tensor:
    """Image-text matching: cross-entropy of the positive among itself and its negatives, images and texts averaged.

    As the published code has it: the logits [b, 1 + k] of a caption with its image and with k others, target 0, and
    the same for an image with its caption and with k others.

    Args:
        positive: logits of the true pairs [b].
        negative_images: logits of each caption with other images [b, k].
        negative_texts: logits of each image with other captions [b, k].
    """
    target = torch.zeros(positive.shape[0], dtype=torch.int64, device=positive.device)
    images = functional.cross_entropy(torch.cat([positive[:, None], negative_images], dim=1), target)
    texts = functional.cross_entropy(torch.cat([positive[:, None], negative_texts], dim=1), target)
    return (images + texts) / 2


def binary_itm_loss(
    positive: torch.Tensor, negative_images: torch.Tensor, negative_texts: torch.Tensor
) -> torch.Tensor:
    """Image-text matching as the paper words it: binary classification of matched pairs against mined negatives.

    The mean over the pairs of each sort, then positives and negatives with equal weight, so that their number plays no
    part. Arguments as for :func:`itm_loss`.
    """
    negatives = torch.cat([negative_images, negative_texts], dim=1)
    true = functional.binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
    false = functional.binary_cross_entropy_with_logits(negatives, torch.zeros_like(negatives))
    return (true + false) / 2


def mlm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Masked language modelling: mean cross-entropy over the masked tokens; 0 where none is masked.

    Args:
        logits: over the vocabulary, of the masked tokens alone [masked, words].
        targets: what stood there, int64 [masked].
    """
    if not targets.shape[0]:
        return logits.sum()
    return functional.cross_entropy(logits, targets)


def recovery_loss(projected: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Text-embedding recovery: mean of 1 - cos(f(t), g(t)).

    Args:
        projected: projection of ``[CLS]`` of the text-only input [b, e].
        embeddings: the text tower's embeddings [b, e].
    """
    return (1 - functional.cosine_similarity(projected, embeddings, dim=1)).mean()


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean of -[y log s + (1 - y) log(1 - s)] with y = sigmoid(teacher) and s = sigmoid(student); same shapes.

    It is minimal, not 0, where both agree.
    """
    return functional.binary_cross_entropy_with_logits(student, torch.sigmoid(teacher))


def alignment_loss(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Symmetric InfoNCE of late-interaction scores [b images, s b captions], the mean over s sets of captions.

    Caption j of each set belongs to image j; captions are told from those of their own set alone.
    """
    images = scores.shape[0]
    logits = (scores / temperature).view(images, -1, images).movedim(1, 0)  # [s, b images, b captions]
    target = torch.arange(images, device=scores.device).repeat(len(logits))
    rows, columns = logits.flatten(0, 1), logits.transpose(1, 2).flatten(0, 1)
    return (functional.cross_entropy(rows, target) + functional.cross_entropy(columns, target)) / 2


def alignment_scores(tokens: torch.Tensor, words: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Late interaction: mean over a caption's words of the largest cosine with any token of the image.

    Args:
        tokens: of the images [b, m, d].
        words: vectors of the distinct words of all captions [w, d].
        shares: which part of each caption's words each of them is [w, c]; a caption without words scores 0.

    Returns:
        [b, c].
    """
    b, m, d = tokens.shape
    cosines = functional.normalize(tokens, dim=2).reshape(b * m, d) @ functional.normalize(words, dim=1).T
    best = cosines.view(b, m, len(words)).amax(dim=1)
    return best.to(shares.dtype) @ shares
