"""The objectives of both phases. The ``forward`` method of an objective maps a batch to losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from edje_index.models.adapter import Adapter
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.config import AugmentationConfig, ObjectiveConfig
from edje_index.training.data.batches import AlignmentBatch, JointBatch
from edje_index.training.model.losses import (
    alignment_loss,
    alignment_scores,
    binary_itm_loss,
    distillation_loss,
    itm_loss,
    mlm_loss,
    recovery_loss,
)
from edje_index.training.model.teacher import Teacher
from edje_index.training.model.trained_part import trained_part

Losses = dict[str, torch.Tensor]
TOTAL = "loss"
FIRST_TEMPERATURE = 0.07


class JointObjective(nn.Module):
    """Objective of the joint phase: matching, masked language modelling, text-embedding recovery and distillation.

    The adapter reads only the images of the worker's own positive pairs, as in the published code. The negative
    images are images of the positive pairs of all workers.

    Args:
        adapter, joint: modules to train.
        config: weights and kinds of the losses.
        augmentation: random augmentation.
        teacher: the teacher; None without distillation.
        gather: maps the tokens of this worker's images to the tokens of the images of all workers.
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
        self._config = config
        self._augmentation = augmentation
        self._gather = gather
        self._teacher = (teacher,)  # in a tuple, so that PyTorch does not register the teacher as a submodule
        self._freeze_unused()

    def forward(self, batch: JointBatch) -> Losses:
        """Return a dictionary with each loss by name, the weighted sum ``loss``, and ``accuracy``.

        ``accuracy`` is the fraction of positive pairs that have a higher logit than all negatives of the pair.
        """
        config = self._config
        tokens = random_subset(
            self.adapter(kept_patches(batch.patches, self._augmentation)), self._augmentation.step_tokens
        )
        hidden = self.joint.hidden_states(batch.inputs, self._gather(tokens).index_select(0, batch.image))
        pairs = batch.pairs * (1 + 2 * batch.negatives)
        logits = self.joint.classification_head(hidden[:pairs])[:, 0].float()
        sizes = [batch.pairs, batch.pairs * batch.negatives, batch.pairs * batch.negatives]
        parts = torch.split(logits, sizes)
        positive, images, texts = parts[0], *(part.view(batch.pairs, batch.negatives) for part in parts[1:])
        loss_of = itm_loss if config.itm == "softmax" else binary_itm_loss
        losses = {"itm": loss_of(positive, images, texts)}
        if batch.masked is not None:
            losses["mlm"] = self._mlm(hidden[pairs:], *batch.masked)
        if batch.text_inputs is not None:
            losses["recovery"] = self._recovery(*batch.text_inputs)
        if (teacher := self._teacher[0]) is not None:
            losses["distillation"] = distillation_loss(parts, torch.split(teacher.logits(batch, self._gather), sizes))
        total = torch.stack([getattr(config, f"{name}_weight") * loss for name, loss in losses.items()]).sum()
        best = torch.cat([images, texts], dim=1).amax(dim=1)
        return {TOTAL: total, **losses, "accuracy": (positive > best).float().mean()}

    def _mlm(self, hidden: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        masked = hidden.reshape(-1, hidden.shape[2]).index_select(0, positions)
        return mlm_loss(self.joint.language_model.cls(masked).float(), targets)

    def _recovery(self, inputs: JointInputs, embeddings: torch.Tensor) -> torch.Tensor:
        no_images = torch.empty(0, 0, self.joint.width, device=embeddings.device)
        hidden = self.joint.hidden_states(inputs, no_images)
        return recovery_loss(self.joint.text_projection(hidden[:, 0]).float(), embeddings)

    def _freeze_unused(self) -> None:
        """Freeze heads that no loss uses, to exclude these heads from weight decay."""
        head = self.joint.language_model.cls.predictions
        if not self._config.mlm_weight:
            for part in (head.transform, head.bias):
                part.requires_grad_(False)
        if not self._config.recovery_weight:
            self.joint.text_projection.requires_grad_(False)
        if not self._config.itm_weight and self._teacher[0] is None:
            self.joint.classification_head.requires_grad_(False)


class AlignmentObjective(nn.Module):
    """Objective of the alignment phase: late interaction of adapter tokens with caption words."""

    # The mean word embedding is subtracted from word embeddings and tokens first, because it carries no information.
    words: torch.Tensor
    mean: torch.Tensor

    def __init__(self, adapter: Adapter, joint: JointEncoder, augmentation: AugmentationConfig) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self._augmentation = augmentation
        self.log_temperature = nn.Parameter(torch.tensor(FIRST_TEMPERATURE).log())
        words: torch.Tensor = joint.text_embeddings.weight.detach()  # type: ignore[operator]
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("mean", words.mean(dim=0), persistent=False)

    def forward(self, batch: AlignmentBatch) -> Losses:
        """Return a dictionary with ``loss`` and ``accuracy``.

        ``accuracy`` is the i2t R@1, between 0 and 1, of the images and the first set of captions.
        """
        tokens = self.adapter(kept_patches(batch.patches, self._augmentation)) - self.mean
        scores = alignment_scores(tokens, self.words[batch.words] - self.mean, batch.shares).float()
        images = tokens.shape[0]
        best = scores[:, :images].argmax(dim=1) == torch.arange(images, device=scores.device)
        loss = alignment_loss(scores, self.log_temperature.exp().clamp(min=0.01))
        return {TOTAL: loss, "accuracy": best.float().mean()}


def kept_patches(patches: torch.Tensor, augmentation: AugmentationConfig) -> torch.Tensor:
    """Return `patches` [b, n, d_v] after patch dropout, as float32. Every image loses the same patch positions."""
    return random_subset(patches, max(1, round(patches.shape[1] * (1 - augmentation.patch_dropout)))).float()


def random_subset(blocks: torch.Tensor, count: int | None) -> torch.Tensor:
    """Keep at most `count` random tokens of each block in `blocks` [b, n, d]. None keeps all tokens.

    The kept positions are the same in every block.
    """
    n = blocks.shape[1]
    if count is None or count >= n:
        return blocks
    return blocks[:, torch.randperm(n)[:count].sort().values.to(blocks.device)]
