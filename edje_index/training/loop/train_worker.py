"""One train worker: opens everything that a task names and runs the phases of the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import CompressionAdapter
from edje_index.models.devices import resolve_device
from edje_index.scoring.stop_words import content_token_mask
from edje_index.training.config import LoopConfig, TrainConfig
from edje_index.training.data.batches import BatchSource, Features, TeacherSource, ViewSource
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.token_rows import SpecialTokens
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.schedule import learning_rate
from edje_index.training.loop.task import TeacherTask, TrainTask
from edje_index.training.loop.training_loop import Phase, Record, Trainer
from edje_index.training.model.adapter_init import init_from_features
from edje_index.training.model.objectives import AlignmentObjective, JointObjective, Teacher, trained_part
from edje_index.training.model.start_bundle import set_attention, set_dropout
from storage_formats.errors import UsageError

ALIGNMENT, JOINT = "alignment", "joint"
_ALIGNMENT_WARMUP = 0.1  # share of the alignment steps


def run_worker(
    task: TrainTask,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_record: Callable[[Record], None] = lambda _: None,
) -> None:
    """Train from the last checkpoint to the end.

    Raises:
        TrainingStopped: `should_stop()` returned True.
        EdjeError: the task cannot be done; the message says why.
    """
    config, device = task.config, resolve_device(task.runtime.device)
    if task.runtime.threads is not None:
        torch.set_num_threads(task.runtime.threads)
    start = _trainable(task, device)
    teacher, teacher_source = (None, None) if task.teacher is None else _open_teacher(task.teacher, device)
    source = batch_source(task, start, group, teacher_source)
    phases = [partial(_joint_phase, config, start, source, teacher)]
    if config.alignment.steps:
        phases.insert(0, partial(_alignment_phase, config, start, source, new_adapter=task.new_adapter))
    Trainer(task, group, device, on_record).run(phases, should_stop)


def batch_source(
    task: TrainTask, start: ModelBundle, group: WorkerGroup, teacher: TeacherSource | None = None
) -> BatchSource:
    """Where the batches of `task` come from. `start` is its bundle, or one with the same tokenizer and adapter."""
    adapter = start.adapter.config
    return BatchSource(
        data=TrainingData.open(task.data),
        features=Features(task.features, adapter),
        teacher=teacher,
        special_tokens=SpecialTokens.of(start.joint.tokenizer),
        image_tokens=min(task.config.augmentation.step_tokens or adapter.num_tokens, adapter.num_tokens),
        temperature=task.temperature,
        config=task.config,
        rank=group.rank,
        world_size=group.size,
        views=ViewSource(Features(task.views.index, adapter), np.load(task.views.rows)) if task.views else None,
    )


def total_steps(config: LoopConfig, images: int) -> int:
    """Optimiser steps of the joint phase.

    Raises:
        UsageError: neither steps nor epochs are set, or there are fewer images than a batch holds.
    """
    if images < config.batch_size:
        raise UsageError(f"{images} images do not fill a batch of {config.batch_size}; lower loop.batch_size")
    if config.steps is not None:
        return config.steps
    if config.epochs is None:
        raise UsageError("the length of the training is missing; set loop.steps or loop.epochs")
    return max(1, math.ceil(config.epochs * _steps_per_epoch(config, images)))


def check_batch_split(batch_size: int, workers: int) -> None:
    """Raise UsageError unless every worker gets an equal part of a batch."""
    if batch_size % workers:
        raise UsageError(
            f"loop.batch_size is {batch_size} and run.workers is {workers}; the batch size must be a multiple"
        )


def _steps_per_epoch(config: LoopConfig, images: int) -> float:
    return (images // config.batch_size) / config.accumulate


def _trainable(task: TrainTask, device: torch.device) -> ModelBundle:
    """The bundle of the first step with gradients where the settings want them."""
    start, architecture = ModelBundle.load(task.start, verify=False), task.config.architecture
    start.adapter.requires_grad_(True)
    start.joint.requires_grad_(True)
    start.joint.text_embeddings.requires_grad_(architecture.word_embeddings == "trained")
    set_dropout(start.joint, architecture.dropout, architecture.attention_dropout)
    set_attention(start.joint, device)
    return start


def _open_teacher(task: TeacherTask, device: torch.device) -> tuple[Teacher, TeacherSource]:
    bundle = ModelBundle.load(task.bundle, verify=False)
    joint = bundle.joint.requires_grad_(False).to(device)
    adapter = None if task.has_tokens else trained_part(bundle.adapter).to(device)
    features = Features(task.index, None if task.has_tokens else bundle.adapter.config)
    rows = np.load(task.rows, mmap_mode="r")
    return Teacher(joint, adapter), TeacherSource(features, rows, bundle.block_shape[0])


def _alignment_phase(config: TrainConfig, start: ModelBundle, source: BatchSource, *, new_adapter: bool) -> Phase:
    settings, adapter = config.alignment, start.adapter
    if new_adapter and settings.adapter_init == "clusters" and isinstance(adapter, CompressionAdapter):
        init_from_features(adapter, source.features, source.data, config.loop.seed)
    optimizer = config.optimizer.model_copy(
        update={"decay": "cosine", "warmup_steps": int(settings.steps * _ALIGNMENT_WARMUP), "adapter_lr_factor": 1.0}
    )
    return Phase(
        name=ALIGNMENT,
        stage=0,
        module=AlignmentObjective(adapter, start.joint, config.augmentation),
        batch=source.alignment(content_token_mask(start.joint.tokenizer)),
        steps=settings.steps,
        accumulate=1,
        images=min(settings.batch_size, source.data.images),
        learning_rate=partial(
            learning_rate, total_steps=settings.steps, steps_per_epoch=1, peak=settings.lr, config=optimizer
        ),
        optimizer=optimizer,
    )


def _joint_phase(config: TrainConfig, start: ModelBundle, source: BatchSource, teacher: Teacher | None) -> Phase:
    if not config.optimizer.adapter_lr_factor:  # its gradients would cost time and count in the norm
        start.adapter.requires_grad_(False)
    steps = total_steps(config.loop, source.data.images)
    return Phase(
        name=JOINT,
        stage=1 if config.alignment.steps else 0,
        module=JointObjective(start.adapter, start.joint, config.objective, config.augmentation, teacher),
        batch=source.joint,
        steps=steps,
        accumulate=config.loop.accumulate,
        images=config.loop.batch_size * config.loop.accumulate,
        learning_rate=partial(
            learning_rate,
            total_steps=steps,
            steps_per_epoch=_steps_per_epoch(config.loop, source.data.images),
            peak=config.optimizer.lr,
            config=config.optimizer,
        ),
        optimizer=config.optimizer,
    )
