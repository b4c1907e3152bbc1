"""The training losses, see the section "Effective Discriminative Training" of the EDJE paper.

Shape letters: b pairs per batch, k negatives per pair, m tokens per image, w distinct words, d width of a token, e
width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


def itm_loss(positive: torch.Tensor, negative_images: torch.Tensor, negative_texts: torch.Tensor) -> torch.Tensor:
    """Image-text matching loss: cross-entropy of each positive pair against its negatives.

    As in the published code, each caption has k negative images, and each image has k negative captions.

    Args:
        positive: logits of the positive pairs [b].
        negative_images: logits of each caption with k other images [b, k].
        negative_texts: logits of each image with k other captions [b, k].
    """
    target = torch.zeros(positive.shape[0], dtype=torch.int64, device=positive.device)
    images = functional.cross_entropy(torch.cat([positive[:, None], negative_images], dim=1), target)
    texts = functional.cross_entropy(torch.cat([positive[:, None], negative_texts], dim=1), target)
    return (images + texts) / 2


def binary_itm_loss(
    positive: torch.Tensor, negative_images: torch.Tensor, negative_texts: torch.Tensor
) -> torch.Tensor:
    """Image-text matching loss of the EDJE paper: binary cross-entropy of positive and negative pairs.

    Positive and negative pairs have the same total weight. Arguments as in :func:`itm_loss`.
    """
    negatives = torch.cat([negative_images, negative_texts], dim=1)
    true = functional.binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
    false = functional.binary_cross_entropy_with_logits(negatives, torch.zeros_like(negatives))
    return (true + false) / 2


def mlm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Masked language modelling loss: mean cross-entropy over the masked tokens. The loss is 0 without masked tokens.

    Args:
        logits: logits of the masked tokens over the vocabulary [masked, vocabulary].
        targets: original token ids of the masked tokens, int64 [masked].
    """
    if not targets.shape[0]:
        return logits.sum()
    return functional.cross_entropy(logits, targets)


def recovery_loss(projected: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Text-embedding recovery loss: mean over captions of 1 - cos(projected, embeddings).

    Args:
        projected: hidden states of ``[CLS]`` in input rows without images, projected to the width e [b, e].
        embeddings: embeddings of the same captions from the text tower [b, e].
    """
    return (1 - functional.cosine_similarity(projected, embeddings, dim=1)).mean()


def distillation_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """Distillation loss: binary cross-entropy between the probabilities of student and teacher.

    The loss is averaged over the pairs of each group, and then over the three groups.

    Args:
        student: logits of the student for three groups of pairs: positive pairs, pairs with negative images, and pairs
            with negative texts.
        teacher: logits of the teacher for the same groups.
    """
    losses = [
        functional.binary_cross_entropy_with_logits(ours, torch.sigmoid(theirs))
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(losses).mean()


def alignment_loss(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Alignment loss: symmetric InfoNCE of late-interaction scores, averaged over s sets of captions.

    Args:
        scores: scores of b images with s sets of b captions [b, s b]. Caption j of each set belongs to image j. A
            caption competes only with captions of the same set.
        temperature: temperature of the softmax, a scalar.
    """
    images = scores.shape[0]
    logits = (scores / temperature).view(images, -1, images).movedim(1, 0)  # [s, b images, b captions]
    target = torch.arange(images, device=scores.device).repeat(len(logits))
    rows, columns = logits.flatten(0, 1), logits.transpose(1, 2).flatten(0, 1)
    return (functional.cross_entropy(rows, target) + functional.cross_entropy(columns, target)) / 2


def alignment_scores(tokens: torch.Tensor, words: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the late-interaction scores of all b images with all c captions, [b, c].

    Args:
        tokens: tokens of the images [b, m, d].
        words: word embeddings of the distinct words of all captions [w, d].
        shares: relative frequency of each word in each caption [w, c]. A caption without words has the score 0.
    """
    b, m, d = tokens.shape
    cosines = functional.normalize(tokens, dim=2).reshape(b * m, d) @ functional.normalize(words, dim=1).T
    best = cosines.view(b, m, len(words)).amax(dim=1)
    return best.to(shares.dtype) @ shares
