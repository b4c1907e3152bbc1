"""Opens everything that the batches of a task are made from."""

from __future__ import annotations

import numpy as np

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.data.batches import BatchSource, Features, TeacherSource, ViewSource
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.token_rows import SpecialTokens
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.task import TrainTask


def batch_source(
    task: TrainTask, start: ModelBundle, group: WorkerGroup, teacher: ModelBundle | None = None
) -> BatchSource:
    """Where the batches of `task` come from.

    Args:
        task: names the data.
        start: its bundle, or one with the same tokenizer and adapter.
        group: says which part of each batch is made.
        teacher: its teacher; None makes batches without the teacher's part.
    """
    adapter = start.adapter.config
    teacher_source = None
    if task.teacher is not None and teacher is not None:
        teacher_features = Features(task.teacher.index, None if task.teacher.has_tokens else teacher.adapter.config)
        teacher_rows = np.load(task.teacher.rows, mmap_mode="r")
        teacher_source = TeacherSource(teacher_features, teacher_rows, teacher.block_shape[0])
    return BatchSource(
        data=TrainingData.open(task.data),
        features=Features(task.features.root, adapter),
        teacher=teacher_source,
        special_tokens=SpecialTokens.of(start.joint.tokenizer),
        image_tokens=min(task.config.augmentation.step_tokens or adapter.num_tokens, adapter.num_tokens),
        temperature=task.temperature,
        config=task.config,
        rank=group.rank,
        world_size=group.size,
        views=ViewSource(Features(task.views.index, adapter), np.load(task.views.rows)) if task.views else None,
    )
