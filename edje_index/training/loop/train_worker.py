"""A training as one rank runs it: everything opened from a task that can travel to another process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import CompressionAdapter
from edje_index.scoring.content_words import content_words
from edje_index.training.config import TrainConfig
from edje_index.training.data.batches import BatchSource, Features, TeacherSource, ViewSource
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.token_rows import SpecialTokens
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.schedule import learning_rate
from edje_index.training.loop.training_loop import Phase, Record, Runtime, Trainer
from edje_index.training.model.adapter_init import init_from_features
from edje_index.training.model.objectives import AlignmentObjective, JointObjective, Teacher, trained_part
from edje_index.training.model.start_bundle import set_attention, set_dropout
from storage_formats.errors import UsageError

ALIGNMENT, JOINT = "alignment", "joint"
_ALIGNMENT_WARMUP = 0.1  # of the phase


@dataclass(frozen=True)
class TeacherTask:
    """A teacher: its bundle, the index that it reads, and whether that holds its tokens or features for its adapter."""

    bundle: Path
    index: Path
    has_tokens: bool
    rows: Path


@dataclass(frozen=True)
class TrainTask:
    """All that a rank needs.

    Attributes:
        config, runtime: what to train and how.
        run: fingerprint of what decides the training.
        start: bundle of the first step.
        features: index of what the adapter is trained on.
        data: folder of a `TrainingData`.
        temperature: of the mining softmax.
        teacher: None without distillation.
        new_adapter: nothing has been learned in the adapter of the first step.
        views: index of the features of views, and a file of its rows [n, views]; None without.
    """

    config: TrainConfig
    runtime: Runtime
    run: str
    start: Path
    features: Path
    data: Path
    temperature: float
    teacher: TeacherTask | None = None
    new_adapter: bool = True
    views: tuple[Path, Path] | None = None


def run_worker(
    task: TrainTask,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_record: Callable[[Record], None] = lambda _: None,
) -> None:
    """Train to the end, from the last checkpoint on.

    Raises:
        TrainingStopped: `should_stop()` turned true.
        EdjeError: the task cannot be done; the message says why.
    """
    config = task.config
    trainer = Trainer(config, task.runtime, group, task.run, on_record)
    start = ModelBundle.load(task.start, verify=False)
    adapter, joint = start.adapter.requires_grad_(True), start.joint.requires_grad_(True)
    joint.text_embeddings.requires_grad_(config.architecture.words == "trained")
    set_dropout(joint, config.architecture.dropout, config.architecture.attention_dropout)
    set_attention(joint, trainer.device)
    teacher, teacher_source = _teacher(task, trainer)
    source = batch_source(task, start, group, teacher_source)

    def alignment() -> Phase:
        init = config.alignment.align_start == "clusters"
        if init and task.new_adapter and isinstance(adapter, CompressionAdapter):
            init_from_features(adapter, source.features, source.data, config.loop.seed)
        return _alignment_phase(config, source, AlignmentObjective(adapter, joint, config.seen), joint_words)

    def joint_phase() -> Phase:
        if not config.optimizer.adapter_lr_factor:  # its gradients would cost time, and count in the norm
            adapter.requires_grad_(False)
        objective = JointObjective(adapter, joint, config.objective, config.seen, teacher)
        return _joint_phase(config, source, objective, index=len(phases) - 1)

    joint_words = content_words(joint.tokenizer)
    phases = [alignment, joint_phase] if config.alignment.align_steps else [joint_phase]
    trainer.run(phases, should_stop)


def batch_source(
    task: TrainTask, start: ModelBundle, group: WorkerGroup, teacher: TeacherSource | None = None
) -> BatchSource:
    """Where the batches of `task` come from; `start` is its bundle, or one with the same tokenizer and adapter."""
    config, m = task.config, start.adapter.config.num_tokens
    return BatchSource(
        data=TrainingData.open(task.data),
        features=Features(task.features, start.adapter.config),
        teacher=teacher,
        special_tokens=SpecialTokens.of(start.joint.tokenizer),
        image_tokens=min(config.seen.step_tokens or m, m),
        temperature=task.temperature,
        config=config,
        rank=group.rank,
        world_size=group.size,
        views=None
        if task.views is None
        else ViewSource(Features(task.views[0], start.adapter.config), np.load(task.views[1])),
    )


def total_steps(config: TrainConfig, images: int) -> int:
    """Optimiser steps of the joint phase.

    Raises:
        UsageError: neither steps nor epochs are given, or there are fewer images than a batch holds.
    """
    loop = config.loop
    if images < loop.batch_size:
        raise UsageError(f"{images} images are fewer than a batch of {loop.batch_size}; lower --batch-size")
    if loop.steps is not None:
        return loop.steps
    if loop.epochs is None:
        raise UsageError("say how long to train: --steps or --epochs")
    return max(1, math.ceil(loop.epochs * _steps_per_epoch(config, images)))


def check_world(config: TrainConfig, world: int) -> None:
    """UsageError unless every worker gets an equal part of a batch."""
    if config.loop.batch_size % world:
        raise UsageError(f"a batch of {config.loop.batch_size} cannot be split over {world} workers evenly")


def _steps_per_epoch(config: TrainConfig, images: int) -> float:
    return (images // config.loop.batch_size) / config.loop.accumulate


def _teacher(task: TrainTask, trainer: Trainer) -> tuple[Teacher | None, TeacherSource | None]:
    if task.teacher is None:
        return None, None
    bundle = ModelBundle.load(task.teacher.bundle, verify=False)
    joint = bundle.joint.requires_grad_(False).to(trainer.device)
    adapter = None if task.teacher.has_tokens else trained_part(bundle.adapter).to(trainer.device)
    trained = None if task.teacher.has_tokens else bundle.adapter.config
    rows = np.load(task.teacher.rows, mmap_mode="r")
    source = TeacherSource(Features(task.teacher.index, trained), rows, bundle.block_shape[0])
    return Teacher(joint, adapter), source


def _alignment_phase(
    config: TrainConfig,
    source: BatchSource,
    objective: AlignmentObjective,
    words: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> Phase:
    settings, steps = config.alignment, config.alignment.align_steps
    optimizer = replace(
        config.optimizer, decay="cosine", warmup_steps=int(steps * _ALIGNMENT_WARMUP), adapter_lr_factor=1.0
    )
    return Phase(
        name=ALIGNMENT,
        index=0,
        module=objective,
        batch=source.alignment(words),
        steps=steps,
        accumulate=1,
        images=min(settings.align_batch_size, source.data.images),
        learning_rate=partial(
            learning_rate, total_steps=steps, steps_per_epoch=1, peak=settings.align_lr, config=optimizer
        ),
        optimizer=optimizer,
    )


def _joint_phase(config: TrainConfig, source: BatchSource, objective: JointObjective, index: int) -> Phase:
    images = source.data.images
    steps = total_steps(config, images)
    return Phase(
        name=JOINT,
        index=index,
        module=objective,
        batch=source.joint,
        steps=steps,
        accumulate=config.loop.accumulate,
        images=config.loop.batch_size * config.loop.accumulate,
        learning_rate=partial(
            learning_rate,
            total_steps=steps,
            steps_per_epoch=_steps_per_epoch(config, images),
            peak=config.lr,
            config=config.optimizer,
        ),
        optimizer=config.optimizer,
    )
