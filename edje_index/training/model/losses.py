"""The losses as pure functions of tensors; see the paper's section "Effective Discriminative Training".

Shape letters: b pairs per batch, k negatives, m tokens per image, w distinct words, d width, e embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


def itm_loss(positive: torch.Tensor, negative_images: torch.Tensor, negative_texts: torch.Tensor) -> torch.Tensor:
    """Image-text matching: cross-entropy of the positive among its negatives, averaged over images and texts.

    This is the form of the published code. The logits of a caption with its image and with k others form a row
    [1 + k] with target 0, and likewise those of an image with its caption and with k others.

    Args:
        positive: logits of the positive pairs [b].
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
    """Image-text matching as the paper describes it: binary classification of positives against mined negatives.

    Positives and negatives have equal weight, whatever their number. Arguments as for :func:`itm_loss`.
    """
    negatives = torch.cat([negative_images, negative_texts], dim=1)
    true = functional.binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
    false = functional.binary_cross_entropy_with_logits(negatives, torch.zeros_like(negatives))
    return (true + false) / 2


def mlm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Masked language modelling: mean cross-entropy over the masked tokens; 0 if none is masked.

    Args:
        logits: logits of the masked tokens over the vocabulary [masked, vocabulary].
        targets: their original token ids, int64 [masked].
    """
    if not targets.shape[0]:
        return logits.sum()
    return functional.cross_entropy(logits, targets)


def recovery_loss(projected: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Text-embedding recovery: mean of 1 - cos(f(t), g(t)).

    Args:
        projected: projected hidden states of ``[CLS]`` in the text-only rows [b, e].
        embeddings: embeddings of the text tower [b, e].
    """
    return (1 - functional.cosine_similarity(projected, embeddings, dim=1)).mean()


def distillation_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean over groups of the mean of -[y log s + (1 - y) log(1 - s)], with y = sigmoid(teacher), s = sigmoid(student).

    The minimum, which is not 0, is reached when both agree.

    Args:
        student: logits of the positive pairs, of those with negative images, and of those with negative texts. Each
            group counts alike, whatever its size.
        teacher: the same of the teacher.
    """
    losses = [
        functional.binary_cross_entropy_with_logits(ours, torch.sigmoid(theirs))
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(losses).mean()


def alignment_loss(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Symmetric InfoNCE of late-interaction scores [b images, s b captions], averaged over s sets of captions.

    Caption j of each set belongs to image j. A caption is contrasted only with captions of its own set.
    """
    images = scores.shape[0]
    logits = (scores / temperature).view(images, -1, images).movedim(1, 0)  # [s, b images, b captions]
    target = torch.arange(images, device=scores.device).repeat(len(logits))
    rows, columns = logits.flatten(0, 1), logits.transpose(1, 2).flatten(0, 1)
    return (functional.cross_entropy(rows, target) + functional.cross_entropy(columns, target)) / 2


def alignment_scores(tokens: torch.Tensor, words: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Late interaction: mean over a caption's words of the largest cosine with any token of the image -> [b, c].

    Args:
        tokens: tokens of the images [b, m, d].
        words: embeddings of the distinct words of all captions [w, d].
        shares: share of each word among the words of each caption [w, c]. A caption without words scores 0.
    """
    b, m, d = tokens.shape
    cosines = functional.normalize(tokens, dim=2).reshape(b * m, d) @ functional.normalize(words, dim=1).T
    best = cosines.view(b, m, len(words)).amax(dim=1)
    return best.to(shares.dtype) @ shares
