"""The teacher in distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.data.batches import JointBatch
from edje_index.training.model.trained_part import trained_part

SCORE_BATCH = 256


@dataclass(frozen=True)
class Teacher:
    """A trained joint encoder. The student learns to imitate its logits.

    Attributes:
        joint: the frozen joint encoder of the teacher.
        adapter: maps features to the teacher's tokens; None if batches contain the teacher's tokens.
    """

    joint: JointEncoder
    adapter: nn.Module | None

    @classmethod
    def of(cls, bundle: ModelBundle, *, has_tokens: bool, device: torch.device) -> Teacher:
        """Load the teacher from `bundle` onto `device`.

        `has_tokens` is True if batches contain tokens of the teacher. It is False if batches contain features.
        """
        joint = bundle.joint.requires_grad_(False).to(device)
        return cls(joint, None if has_tokens else trained_part(bundle.adapter).to(device))

    @torch.no_grad()
    def logits(self, batch: JointBatch, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the teacher's logits of all positive and negative pairs of `batch`, float32 [b (1 + 2 k)].

        `gather` returns the tokens of the images of all workers.
        """
        assert batch.teacher is not None
        inputs, blocks = batch.teacher
        features = (batch.patches if blocks is None else blocks).float()
        tokens = gather(features if self.adapter is None else self.adapter(features))
        image = batch.image[: inputs.input_ids.shape[0]]
        parts = []
        for start in range(0, len(image), SCORE_BATCH):
            rows = slice(start, start + SCORE_BATCH)
            parts.append(self.joint(_rows(inputs, rows), tokens.index_select(0, image[rows])).float())
        return torch.cat(parts)


def _rows(inputs: JointInputs, rows: slice) -> JointInputs:
    return JointInputs(inputs.input_ids[rows], inputs.token_type_ids[rows], inputs.attention_mask[rows])
