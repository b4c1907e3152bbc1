"""What each phase computes of a batch: modules whose ``forward`` gives the losses.

The adapter runs once for each distinct image of a batch; all pairs and the rows with masked captions go through the
language model together, the short text-only rows apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from edje_index.models.adapter import Adapter, ReducedAdapter
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.config import ObjectiveConfig, SeenConfig
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

Losses = dict[str, torch.Tensor]
TOTAL = "loss"
SCORE_BATCH = 256
FIRST_TEMPERATURE = 0.07


@dataclass(frozen=True)
class Teacher:
    """A trained joint encoder whose logits are imitated.

    Attributes:
        joint: frozen.
        adapter: from features to its tokens; None where the tokens themselves are at hand.
    """

    joint: JointEncoder
    adapter: nn.Module | None

    @torch.no_grad()
    def logits(self, batch: JointBatch) -> torch.Tensor:
        """Of the batch's pairs, float32 [b (1 + 2 k)]."""
        assert batch.teacher is not None
        inputs, blocks = batch.teacher
        tokens = blocks.float() if self.adapter is None else self.adapter(blocks.float())
        image = batch.image[: inputs.input_ids.shape[0]]
        parts = []
        for start in range(0, len(image), SCORE_BATCH):
            rows = slice(start, start + SCORE_BATCH)
            parts.append(self.joint(_rows(inputs, rows), tokens.index_select(0, image[rows])).float())
        return torch.cat(parts)


class JointObjective(nn.Module):
    """Matching, masked language modelling, recovery of the text embedding and distillation, weighted and summed."""

    def __init__(
        self,
        adapter: Adapter,
        joint: JointEncoder,
        config: ObjectiveConfig,
        seen: SeenConfig,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self.joint = joint
        self._config = config
        self._seen = seen
        self._teacher = (teacher,)  # in a tuple: it is no part of what is trained
        self._freeze_unused()

    def forward(self, batch: JointBatch) -> Losses:
        """Each loss, their weighted sum as ``loss``, and ``accuracy``: positives scored above all their negatives."""
        config = self._config
        tokens = some_of(self.adapter(seen_patches(batch.patches, self._seen)), self._seen.step_tokens)
        hidden = self.joint.hidden_states(batch.inputs, tokens.index_select(0, batch.image))
        pairs = batch.pairs * (1 + 2 * batch.negatives)
        logits = self.joint.classification_head(hidden[:pairs])[:, 0].float()
        parts = logits.split([batch.pairs, batch.pairs * batch.negatives, batch.pairs * batch.negatives])
        positive, images, texts = parts[0], *(part.view(batch.pairs, batch.negatives) for part in parts[1:])
        loss_of = itm_loss if config.itm == "softmax" else binary_itm_loss
        losses = {"itm": loss_of(positive, images, texts)}
        if batch.masked is not None:
            losses["mlm"] = self._mlm(hidden[pairs:], *batch.masked)
        if batch.text_inputs is not None:
            losses["recovery"] = self._recovery(*batch.text_inputs)
        if (teacher := self._teacher[0]) is not None:
            losses["distillation"] = distillation_loss(logits, teacher.logits(batch))
        total = torch.stack([getattr(config, f"{name}_weight") * loss for name, loss in losses.items()]).sum()
        best = torch.cat([images, texts], dim=1).amax(dim=1)
        return {TOTAL: total, **losses, "accuracy": (positive > best).float().mean()}

    def _mlm(self, hidden: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        covered = hidden.reshape(-1, hidden.shape[2]).index_select(0, places)
        return mlm_loss(self.joint.language_model.cls(covered).float(), targets)

    def _recovery(self, inputs: JointInputs, embeddings: torch.Tensor) -> torch.Tensor:
        nothing = torch.empty(0, 0, self.joint.width, device=embeddings.device)
        hidden = self.joint.hidden_states(inputs, nothing)
        return recovery_loss(self.joint.text_projection(hidden[:, 0]).float(), embeddings)

    def _freeze_unused(self) -> None:
        """Heads without a loss take no part: neither decay nor the exchange of gradients touches them."""
        head = self.joint.language_model.cls.predictions
        if not self._config.mlm_weight:
            for part in (head.transform, head.bias):
                part.requires_grad_(False)
        if not self._config.recovery_weight:
            self.joint.text_projection.requires_grad_(False)
        if not self._config.itm_weight and self._teacher[0] is None:
            self.joint.classification_head.requires_grad_(False)


class AlignmentObjective(nn.Module):
    """The adapter's tokens against the words of the captions, without the language model.

    Words and tokens are compared after the mean word has been taken from both: the vectors of a language model's words
    share one large component, which says nothing.
    """

    words: torch.Tensor
    mean: torch.Tensor

    def __init__(self, adapter: Adapter, joint: JointEncoder, seen: SeenConfig) -> None:
        super().__init__()
        self.adapter = trained_part(adapter)
        self._seen = seen
        self.log_temperature = nn.Parameter(torch.tensor(FIRST_TEMPERATURE).log())
        words: torch.Tensor = joint.text_embeddings.weight.detach()  # type: ignore[operator]
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("mean", words.mean(dim=0), persistent=False)

    def forward(self, batch: AlignmentBatch) -> Losses:
        """``loss``, and ``accuracy``: images whose own caption of the first set scores best in it."""
        tokens = self.adapter(seen_patches(batch.patches, self._seen)) - self.mean
        scores = alignment_scores(tokens, self.words[batch.words] - self.mean, batch.shares).float()
        images = tokens.shape[0]
        best = scores[:, :images].argmax(dim=1) == torch.arange(images, device=scores.device)
        loss = alignment_loss(scores, self.log_temperature.exp().clamp(min=0.01))
        return {TOTAL: loss, "accuracy": best.float().mean()}


def seen_patches(patches: torch.Tensor, seen: SeenConfig) -> torch.Tensor:
    """What is left of features [b, n, d_v], float32."""
    return some_of(patches, max(1, round(patches.shape[1] * (1 - seen.patch_dropout)))).float()


def some_of(blocks: torch.Tensor, count: int | None) -> torch.Tensor:
    """At most `count` of the tokens of blocks [b, n, d], in their order, the same of all; the choice is torch's."""
    n = blocks.shape[1]
    if count is None or count >= n:
        return blocks
    return blocks[:, torch.randperm(n)[:count].sort().values.to(blocks.device)]


def trained_part(adapter: Adapter) -> nn.Module:
    """What maps stored features to tokens: a reduction is made when features are, its MLP is what is trained."""
    return adapter.local if isinstance(adapter, ReducedAdapter) else adapter


def _rows(inputs: JointInputs, rows: slice) -> JointInputs:
    return JointInputs(inputs.input_ids[rows], inputs.token_type_ids[rows], inputs.attention_mask[rows])
