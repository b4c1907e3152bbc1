"""Computes the losses of a training step. The objective of a phase maps a batch to its
losses, and computes the gradients.

The section "Effective Discriminative Training" of the EDJE paper describes the losses
of the joint phase.
Shape letters: b pairs per batch, k negatives per pair, m tokens per image, w distinct
words, d width of a token, e width of an embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import Adapter
from edje_index.models.devices import autocast
from edje_index.models.joint_encoder import JointEncoder
from edje_index.training.batches import (
    AlignmentBatch,
    JointBatch,
    PairChunk,
)
from edje_index.training.config import ObjectiveConfig
from edje_index.training.start import trained_part

Losses = dict[str, Tensor]
TOTAL = "loss"
FIRST_TEMPERATURE = 0.07


def itm_loss(
    positive: Tensor, negative_images: Tensor, negative_texts: Tensor
) -> Tensor:
    """Image-text matching loss: cross-entropy of each positive pair against its
    negatives.

    As in the published code, each caption has k negative images, and each image has k
    negative captions.

    Args:
        positive: logits of the positive pairs [b].
        negative_images: logits of each caption with k other images [b, k].
        negative_texts: logits of each image with k other captions [b, k].
    """
    target = torch.zeros(positive.shape[0], dtype=torch.int64, device=positive.device)
    images, texts = (
        functional.cross_entropy(torch.cat([positive[:, None], others], dim=1), target)
        for others in (negative_images, negative_texts)
    )
    return (images + texts) / 2


def mlm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Masked language modelling loss: mean cross-entropy over the masked tokens. The
    loss is 0 without masked tokens.

    Args:
        logits: logits of the masked tokens over the vocabulary [masked, vocabulary].
        targets: original token ids of the masked tokens, int64 [masked].
    """
    # The sum over no tokens is 0. Unlike a constant, it has gradients, which are 0.
    total = functional.cross_entropy(logits, targets, reduction="sum")
    return total / max(1, len(targets))


def recovery_loss(projected: Tensor, embeddings: Tensor) -> Tensor:
    """Text-embedding recovery loss: mean over captions of 1 - cos(projected,
    embeddings).

    Args:
        projected: hidden states of ``[CLS]`` in input rows without images, projected to
            the width e [b, e].
        embeddings: embeddings of the same captions from the text tower [b, e].
    """
    return (1 - functional.cosine_similarity(projected, embeddings, dim=1)).mean()


def distillation_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Distillation loss: binary cross-entropy between the probabilities of student and
    teacher.

    The loss is averaged over the pairs of each group, and then over the three groups.

    Args:
        student: logits of the student for three groups of pairs: positive pairs, pairs
            with negative images, and pairs with negative texts.
        teacher: logits of the teacher for the same groups.
    """
    losses = [
        functional.binary_cross_entropy_with_logits(ours, torch.sigmoid(theirs))
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(losses).mean()


def alignment_loss(scores: Tensor, temperature: Tensor) -> Tensor:
    """Alignment loss: symmetric InfoNCE of late-interaction scores, averaged over s
    sets of captions.

    Args:
        scores: scores of b images with s sets of b captions [b, s b]. Caption j of each
            set belongs to image j. A caption competes only with captions of the same
            set.
        temperature: temperature of the softmax, a scalar.
    """
    images = scores.shape[0]
    # [s, b images, b captions]
    logits = (scores / temperature).view(images, -1, images).movedim(1, 0)
    target = torch.arange(images, device=scores.device).repeat(len(logits))
    rows = logits.flatten(0, 1)
    columns = logits.transpose(1, 2).flatten(0, 1)
    return (
        functional.cross_entropy(rows, target)
        + functional.cross_entropy(columns, target)
    ) / 2


def alignment_scores(tokens: Tensor, words: Tensor, shares: Tensor) -> Tensor:
    """Return the late-interaction scores of all b images with all c captions, [b, c].

    For each word of a caption, take the largest cosine similarity with a token of the
    image. The score is the mean over the words.

    Args:
        tokens: tokens of the images [b, m, d].
        words: word embeddings of the distinct words of all captions [w, d].
        shares: relative frequency of each word in each caption [w, c]. A caption
            without words has the score 0.
    """
    b, m, d = tokens.shape
    cosines = (
        functional.normalize(tokens, dim=2).reshape(b * m, d)
        @ functional.normalize(words, dim=1).T
    )
    best = cosines.view(b, m, len(words)).amax(dim=1)
    return best.to(shares.dtype) @ shares


class JointObjective(nn.Module):
    """Objective of the joint phase: matching, masked language modelling, text-embedding
    recovery and distillation.

    The adapter reads only the images of the worker's own positive pairs, as in the
    published code. The negative images are images of the positive pairs of all workers,
    whose tokens come from `gather`.

    Args:
        adapter, joint: modules to train.
        step_tokens: tokens per image that the joint encoder reads; None for all.
        teacher: bundle of the teacher, a trained model whose logits the student learns
            to imitate; None without distillation.
        gather: maps the tokens of this worker's images to the tokens of the images of
            all workers.
    """

    def __init__(
        self,
        adapter: Adapter,
        joint: JointEncoder,
        config: ObjectiveConfig,
        step_tokens: int | None = None,
        teacher: ModelBundle | None = None,
        gather: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    ) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self.joint = joint
        self._weights = {
            "mlm": config.mlm_weight,
            "recovery": config.recovery_weight,
            "accuracy": 0.0,
        }
        self._step_tokens = step_tokens
        self._gather = gather
        # A bundle is not a PyTorch module, so its weights are not part of this module.
        self._teacher = teacher

    def backward(self, batch: JointBatch, dtype: torch.dtype = torch.float32) -> Losses:
        """Add the gradients of the loss of `batch` to the gradients of the parameters.
        Matrix products are computed in `dtype`.

        The adapter runs forward and backward once for the whole batch. The joint
        encoder runs forward and backward for each chunk in turn, so that memory holds
        its activations for one chunk only.

        Returns:
            Each loss by name, the weighted sum ``loss``, and ``accuracy``: the fraction
            of positive pairs that have a higher logit than all negatives of the pair.
        """
        device = batch.patches.device
        with autocast(dtype, device):
            tokens = self._gather(
                random_subset(self.adapter(as_input(batch.patches)), self._step_tokens)
            )
            teacher_tokens = None
            if self._teacher is not None:
                teacher_tokens = batch.teacher_tokens
                if teacher_tokens is None:
                    adapter = trained_part(self._teacher.adapter)
                    with torch.no_grad():
                        teacher_tokens = adapter(batch.patches.float())
                teacher_tokens = self._gather(teacher_tokens.float())
        # The joint encoder reads `leaf`, a copy of the tokens in full precision. All
        # chunks add their gradients to those of `leaf`, and the backward pass of the
        # adapter starts from the sum.
        leaf = tokens.detach().to(self.joint.text_projection.weight.dtype)
        leaf.requires_grad_(tokens.requires_grad)
        pairs = sum(chunk.pairs for chunk in batch.chunks)
        masked = sum(len(chunk.masked[0]) for chunk in batch.chunks if chunk.masked)
        sums: Any = Counter()
        for chunk in batch.chunks:
            with autocast(dtype, device):
                losses = self.losses(chunk, leaf, teacher_tokens)
            # The losses of a chunk are means over its pairs, or over its masked tokens.
            # Weighted by the share of the chunk in the batch, they sum up to the means
            # of the batch.
            shares = dict.fromkeys(losses, chunk.pairs / pairs)
            if chunk.masked is not None:
                shares["mlm"] = len(chunk.masked[0]) / max(1, masked)
            parts = {name: shares[name] * loss for name, loss in losses.items()}
            total = torch.stack(
                [self._weights.get(name, 1.0) * loss for name, loss in parts.items()]
            ).sum()
            torch.autograd.backward(total)
            sums.update({name: value.detach() for name, value in parts.items()})
            sums[TOTAL] += total.detach()
        if tokens.requires_grad:
            assert leaf.grad is not None
            torch.autograd.backward(tokens, leaf.grad.to(tokens.dtype))
        return dict(sums)

    def losses(
        self,
        chunk: PairChunk,
        tokens: Tensor,
        teacher_tokens: Tensor | None = None,
    ) -> Losses:
        """Return each loss of a chunk by name, without its weight, and ``accuracy``.

        `tokens` [images, m, d] are the tokens of the images of all workers, and
        `teacher_tokens` are the teacher's tokens of the same images.
        """
        hidden = self.joint.hidden_states(
            chunk.rows, tokens.index_select(0, chunk.images)
        )
        negatives = chunk.negative_images
        scored = chunk.pairs + 2 * negatives.numel()

        def groups(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Split logits into positive pairs [b], and pairs with negative images and
            with negative texts, [b, k] each.
            """
            images, texts = logits[chunk.pairs :].view(2, *negatives.shape)
            return logits[: chunk.pairs], images, texts

        parts = groups(self.joint.classification_head(hidden[:scored])[:, 0].float())
        positive, images, texts = parts
        losses = {"itm": itm_loss(*parts)}
        if chunk.masked is not None:
            words = self.joint.language_model.cls(hidden[-chunk.pairs :][chunk.masked])
            targets = chunk.rows.input_ids[: chunk.pairs][chunk.masked]
            losses["mlm"] = mlm_loss(words.float(), targets)
        if chunk.recovery is not None:
            inputs, embeddings = chunk.recovery
            cls = self.joint.hidden_states(inputs, tokens[:0])[:, 0]
            projected = self.joint.text_projection(cls)
            losses["recovery"] = recovery_loss(projected.float(), embeddings)
        if self._teacher is not None:
            assert chunk.teacher is not None
            assert teacher_tokens is not None
            with torch.no_grad():
                taught = self._teacher.joint(
                    chunk.teacher, teacher_tokens.index_select(0, chunk.images[:scored])
                )
            losses["distillation"] = distillation_loss(parts, groups(taught))
        best = torch.cat([images, texts], dim=1).amax(dim=1)
        losses["accuracy"] = (positive > best).float().mean()
        return losses


class AlignmentObjective(nn.Module):
    """Objective of the alignment phase, which trains the late interaction between the
    tokens of the adapter and the words of captions.
    """

    # The mean of all word embeddings does not help to tell words apart. It is therefore
    # subtracted from word embeddings and tokens before they are compared.
    words: Tensor
    mean: Tensor

    def __init__(self, adapter: Adapter, joint: JointEncoder) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self.log_temperature = nn.Parameter(torch.tensor(FIRST_TEMPERATURE).log())
        table = joint.text_embeddings.weight
        words: Tensor = table.detach()  # type: ignore[operator]
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("mean", words.mean(dim=0), persistent=False)

    def backward(
        self, batch: AlignmentBatch, dtype: torch.dtype = torch.float32
    ) -> Losses:
        """Add the gradients of the loss of `batch` to the gradients of the parameters.
        Matrix products are computed in `dtype`.

        Returns:
            ``loss``.
        """
        with autocast(dtype, batch.patches.device):
            tokens = self.adapter(as_input(batch.patches)) - self.mean
            scores = alignment_scores(
                tokens, self.words[batch.words] - self.mean, batch.shares
            ).float()
            loss = alignment_loss(scores, self.log_temperature.exp().clamp(min=0.01))
        torch.autograd.backward(loss)
        return {TOTAL: loss.detach()}


def as_input(patches: Tensor) -> Tensor:
    """Return `patches` in a data type that the adapter can multiply with its weights:
    unchanged under autocast, and in at least float32 otherwise.
    """
    # Autocast converts features and weights to the same data type.
    if torch.is_autocast_enabled(patches.device.type):
        return patches
    return patches.to(torch.promote_types(patches.dtype, torch.float32))


def random_subset(blocks: Tensor, count: int | None) -> Tensor:
    """Keep at most `count` random tokens of each block in `blocks` [b, n, d]. None
    keeps all tokens.

    The kept positions are the same in every block.
    """
    n = blocks.shape[1]
    if count is None or count >= n:
        return blocks
    return blocks[:, torch.randperm(n)[:count].sort().values.to(blocks.device)]
