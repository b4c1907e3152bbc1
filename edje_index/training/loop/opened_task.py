"""Opens the files of a training task: bundles, features and captions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.devices import resolve_device
from edje_index.training.data.batches import BatchSource, TeacherSource
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.features import StoredFeatures
from edje_index.training.data.token_rows import SpecialTokens
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.feature_task import FeatureReader
from edje_index.training.loop.task import TrainTask
from edje_index.training.model.teacher import Teacher


@dataclass(frozen=True)
class OpenedTask:
    """The open files of a training task.

    Attributes:
        start: bundle with the initial weights.
        device: device to train on.
        source: makes the batches.
        teacher: the teacher, on `device`; None without distillation.
    """

    start: ModelBundle
    device: torch.device
    source: BatchSource
    teacher: Teacher | None


def open_task(task: TrainTask, group: WorkerGroup) -> OpenedTask:
    """Open the files of `task`. `group` describes the worker that uses the files.

    Raises:
        EdjeError: the device or a file cannot be used.
    """
    device = resolve_device(task.runtime.device)
    start = ModelBundle.load(task.start, verify=False)
    adapter = start.adapter.config
    teacher = teacher_source = None
    if task.teacher is not None:
        bundle = ModelBundle.load(task.teacher.bundle, verify=False)
        teacher_source, has_tokens = TeacherSource(bundle.block_shape[0]), False
        if task.teacher.index is not None and task.teacher.rows is not None:
            has_tokens = task.teacher.index.manifest.model["fingerprint"] == bundle.encoder_fingerprint
            teacher_features = StoredFeatures(task.teacher.index, None if has_tokens else bundle.adapter.config)
            teacher_rows = np.load(task.teacher.rows, mmap_mode="r")
            teacher_source = TeacherSource(bundle.block_shape[0], teacher_features, teacher_rows)
        teacher = Teacher.of(bundle, has_tokens=has_tokens, device=device)
    data = TrainingData.open(task.data)
    features, views = task.features.open(FeatureReader(task, start, data, group.rank, device))
    source = BatchSource(
        data=data,
        features=features,
        teacher=teacher_source,
        special_tokens=SpecialTokens.of(start.joint.tokenizer),
        image_tokens=min(task.config.augmentation.step_tokens or adapter.num_tokens, adapter.num_tokens),
        temperature=task.temperature,
        config=task.config,
        rank=group.rank,
        world_size=group.size,
        views=views,
    )
    return OpenedTask(start, device, source, teacher)
