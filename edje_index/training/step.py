"""The losses of a training step, and the objectives of both phases, which map a batch
to losses.

For the losses, see the section "Effective Discriminative Training" of the EDJE paper.
Shape letters: b pairs per batch, k negatives per pair, m tokens per image, w distinct
words, d width of a token, e width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from edje_index.models.adapter import Adapter
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.batches import AlignmentBatch, JointBatch
from edje_index.training.config import AugmentationConfig, ObjectiveConfig
from edje_index.training.start import trained_part

Losses = dict[str, torch.Tensor]
TOTAL = "loss"
FIRST_TEMPERATURE = 0.07
# pairs per forward pass of the teacher
_TEACHER_BATCH = 256


def itm_loss(
    positive: torch.Tensor, negative_images: torch.Tensor, negative_texts: torch.Tensor
) -> torch.Tensor:
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


def mlm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Masked language modelling loss: mean cross-entropy over the masked tokens. The
    loss is 0 without masked tokens.

    Args:
        logits: logits of the masked tokens over the vocabulary [masked, vocabulary].
        targets: original token ids of the masked tokens, int64 [masked].
    """
    if not targets.shape[0]:
        return logits.sum()
    return functional.cross_entropy(logits, targets)


def recovery_loss(projected: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Text-embedding recovery loss: mean over captions of 1 - cos(projected,
    embeddings).

    Args:
        projected: hidden states of ``[CLS]`` in input rows without images, projected to
            the width e [b, e].
        embeddings: embeddings of the same captions from the text tower [b, e].
    """
    return (1 - functional.cosine_similarity(projected, embeddings, dim=1)).mean()


def distillation_loss(
    student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Distillation loss: binary cross-entropy between the probabilities of student and
    teacher.

    The loss is averaged over the pairs of each group, and then over the three groups.

    Args:
        student: logits of the student for three groups of pairs: positive pairs, pairs
            with negative images, and pairs with negative texts.
    """
    losses = [
        functional.binary_cross_entropy_with_logits(ours, torch.sigmoid(theirs))
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(losses).mean()


def alignment_loss(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
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


def alignment_scores(
    tokens: torch.Tensor, words: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the late-interaction scores of all b images with all c captions, [b, c].

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


class Teacher:
    """A trained joint encoder on `device`. The student learns to imitate its logits.

    Args:
        joint: the joint encoder of the teacher. It is frozen.
        adapter: maps features to the teacher's tokens; None if batches contain the
            teacher's tokens.
    """

    def __init__(
        self, joint: JointEncoder, adapter: nn.Module | None, device: torch.device
    ) -> None:
        self.joint = joint.requires_grad_(False).to(device)
        self.adapter = None if adapter is None else adapter.to(device)

    @torch.no_grad()
    def logits(
        self, batch: JointBatch, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the teacher's logits of all positive and negative pairs of `batch`,
        float32 [b (1 + 2 k)].

        `gather` returns the tokens of the images of all workers.
        """
        assert batch.teacher is not None
        inputs, tokens = batch.teacher
        tokens = gather(
            self.adapter(batch.patches.float())  # type: ignore[misc]
            if tokens is None
            else tokens.float()
        )
        parts = []
        for start in range(0, len(inputs.input_ids), _TEACHER_BATCH):
            rows = slice(start, start + _TEACHER_BATCH)
            part = JointInputs(
                inputs.input_ids[rows],
                inputs.token_type_ids[rows],
                inputs.attention_mask[rows],
            )
            images = batch.image[: len(inputs.input_ids)][rows]
            parts.append(self.joint(part, tokens.index_select(0, images)).float())
        return torch.cat(parts)


class JointObjective(nn.Module):
    """Objective of the joint phase: matching, masked language modelling, text-embedding
    recovery and distillation.

    The adapter reads only the images of the worker's own positive pairs, as in the
    published code. The negative images are images of the positive pairs of all workers.

    Args:
        adapter, joint: modules to train. Heads that no loss uses are frozen, which
        excludes them from weight decay.
        teacher: the teacher; None without distillation.
        gather: maps the tokens of this worker's images to the tokens of the images of
            all workers.
    """

    def __init__(
        self,
        adapter: Adapter,
        joint: JointEncoder,
        config: ObjectiveConfig,
        augmentation: AugmentationConfig,
        teacher: Teacher | None = None,
        gather: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens,
    ) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self.joint = joint
        self._weights = {"mlm": config.mlm_weight, "recovery": config.recovery_weight}
        self._augmentation = augmentation
        self._gather = gather
        # in a tuple, so that PyTorch does not register the teacher as a submodule
        self._teacher = (teacher,)
        head = joint.language_model.cls.predictions
        if not config.mlm_weight:
            for part in (head.transform, head.bias):
                part.requires_grad_(False)
        if not config.recovery_weight:
            joint.text_projection.requires_grad_(False)

    def forward(self, batch: JointBatch) -> Losses:
        """Return a dictionary with each loss by name, the weighted sum ``loss``, and
        ``accuracy``.

        ``accuracy`` is the fraction of positive pairs that have a higher logit than all
        negatives of the pair.
        """
        tokens = random_subset(
            self.adapter(kept_patches(batch.patches, self._augmentation)),
            self._augmentation.step_tokens,
        )
        hidden = self.joint.hidden_states(
            batch.inputs, self._gather(tokens).index_select(0, batch.image)
        )
        pairs = batch.pairs * (1 + 2 * batch.negatives)
        logits = self.joint.classification_head(hidden[:pairs])[:, 0].float()
        negatives = batch.pairs * batch.negatives
        sizes = [batch.pairs, negatives, negatives]
        parts = torch.split(logits, sizes)
        positive = parts[0]
        images = parts[1].view(batch.pairs, batch.negatives)
        texts = parts[2].view(batch.pairs, batch.negatives)
        losses = {"itm": itm_loss(positive, images, texts)}
        if batch.masked is not None:
            positions, targets = batch.masked
            masked = (
                hidden[pairs:].reshape(-1, hidden.shape[2]).index_select(0, positions)
            )
            losses["mlm"] = mlm_loss(
                self.joint.language_model.cls(masked).float(), targets
            )
        if batch.text_inputs is not None:
            inputs, embeddings = batch.text_inputs
            no_images = torch.empty(0, 0, self.joint.width, device=embeddings.device)
            cls = self.joint.hidden_states(inputs, no_images)[:, 0]
            losses["recovery"] = recovery_loss(
                self.joint.text_projection(cls).float(), embeddings
            )
        if (teacher := self._teacher[0]) is not None:
            losses["distillation"] = distillation_loss(
                parts, torch.split(teacher.logits(batch, self._gather), sizes)
            )
        total = torch.stack(
            [self._weights.get(name, 1.0) * loss for name, loss in losses.items()]
        ).sum()
        best = torch.cat([images, texts], dim=1).amax(dim=1)
        return {TOTAL: total, **losses, "accuracy": (positive > best).float().mean()}


class AlignmentObjective(nn.Module):
    """Objective of the alignment phase: late interaction of adapter tokens with
    caption words.
    """

    # The mean word embedding is subtracted from word embeddings and tokens first,
    # because it carries no information.
    words: torch.Tensor
    mean: torch.Tensor

    def __init__(
        self, adapter: Adapter, joint: JointEncoder, augmentation: AugmentationConfig
    ) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self._augmentation = augmentation
        self.log_temperature = nn.Parameter(torch.tensor(FIRST_TEMPERATURE).log())
        table = joint.text_embeddings.weight
        words: torch.Tensor = table.detach()  # type: ignore[operator]
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("mean", words.mean(dim=0), persistent=False)

    def forward(self, batch: AlignmentBatch) -> Losses:
        """Return a dictionary with ``loss`` and ``accuracy``.

        ``accuracy`` is the i2t R@1, between 0 and 1, of the images and the first set of
        captions.
        """
        tokens = (
            self.adapter(kept_patches(batch.patches, self._augmentation)) - self.mean
        )
        scores = alignment_scores(
            tokens, self.words[batch.words] - self.mean, batch.shares
        ).float()
        images = tokens.shape[0]
        best = scores[:, :images].argmax(dim=1) == torch.arange(
            images, device=scores.device
        )
        loss = alignment_loss(scores, self.log_temperature.exp().clamp(min=0.01))
        return {TOTAL: loss, "accuracy": best.float().mean()}


def kept_patches(
    patches: torch.Tensor, augmentation: AugmentationConfig
) -> torch.Tensor:
    """Return `patches` [b, n, d_v] after patch dropout, as float32. Every image
    loses the same patch positions.
    """
    return random_subset(
        patches, max(1, round(patches.shape[1] * (1 - augmentation.patch_dropout)))
    ).float()


def random_subset(blocks: torch.Tensor, count: int | None) -> torch.Tensor:
    """Keep at most `count` random tokens of each block in `blocks` [b, n, d]. None
    keeps all tokens.

    The kept positions are the same in every block.
    """
    n = blocks.shape[1]
    if count is None or count >= n:
        return blocks
    return blocks[:, torch.randperm(n)[:count].sort().values.to(blocks.device)]
