"""The teacher of a distillation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.data.batches import Features, JointBatch, TeacherSource
from edje_index.training.loop.task import TeacherTask
from edje_index.training.model.trained_part import trained_part

SCORE_BATCH = 256


@dataclass(frozen=True)
class Teacher:
    """A trained joint encoder whose logits the student imitates.

    Attributes:
        joint: the frozen joint encoder.
        adapter: maps features to its tokens; None if batches hold the tokens.
    """

    joint: JointEncoder
    adapter: nn.Module | None

    @torch.no_grad()
    def logits(self, batch: JointBatch) -> torch.Tensor:
        """Logits of the batch's pairs, float32 [b (1 + 2 k)]."""
        assert batch.teacher is not None
        inputs, blocks = batch.teacher
        tokens = blocks.float() if self.adapter is None else self.adapter(blocks.float())
        image = batch.image[: inputs.input_ids.shape[0]]
        parts = []
        for start in range(0, len(image), SCORE_BATCH):
            rows = slice(start, start + SCORE_BATCH)
            parts.append(self.joint(_rows(inputs, rows), tokens.index_select(0, image[rows])).float())
        return torch.cat(parts)


def open_teacher(task: TeacherTask, device: torch.device) -> tuple[Teacher, TeacherSource]:
    """The teacher on `device`, and the source of what it reads."""
    bundle = ModelBundle.load(task.bundle, verify=False)
    joint = bundle.joint.requires_grad_(False).to(device)
    adapter = None if task.has_tokens else trained_part(bundle.adapter).to(device)
    features = Features(task.index, None if task.has_tokens else bundle.adapter.config)
    rows = np.load(task.rows, mmap_mode="r")
    return Teacher(joint, adapter), TeacherSource(features, rows, bundle.block_shape[0])


def _rows(inputs: JointInputs, rows: slice) -> JointInputs:
    return JointInputs(inputs.input_ids[rows], inputs.token_type_ids[rows], inputs.attention_mask[rows])
