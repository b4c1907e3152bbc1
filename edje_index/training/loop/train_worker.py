"""Runs the alignment phase and the joint phase on one worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from edje_index.models.adapter import CompressionAdapter
from edje_index.scoring.stop_words import content_token_mask
from edje_index.training.loop.dev_recall import dev_evaluation
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.opened_task import OpenedTask, open_task
from edje_index.training.loop.schedule import learning_rate, steps_per_epoch
from edje_index.training.loop.task import TrainTask
from edje_index.training.loop.training_loop import Phase, Record, Trainer
from edje_index.training.model.adapter_init import init_from_features
from edje_index.training.model.objectives import AlignmentObjective, JointObjective
from edje_index.training.model.start_bundle import make_trainable

ALIGNMENT, JOINT = "alignment", "joint"
_ALIGNMENT_WARMUP = 0.1  # warm-up steps as a fraction of the alignment steps


def run_worker(
    task: TrainTask,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_record: Callable[[Record], None] = lambda _: None,
) -> None:
    """Run `task` on this worker. If there is a checkpoint, training continues from the last checkpoint.

    Args:
        task: what to train.
        group: rank of this worker, and number of workers.
        should_stop: called after every step. If the result is True, the run saves a checkpoint and stops.
        on_record: called with every log record, only on worker 0.

    Raises:
        TrainingStopped: `should_stop` returned True on at least one worker.
        EdjeError: the device or a file cannot be used, or training failed.
    """
    if task.runtime.threads is not None:
        torch.set_num_threads(task.runtime.threads)
    opened = open_task(task, group)
    make_trainable(opened.start, task.config.architecture, opened.device)
    phases = [partial(_joint_phase, task, opened, group)]
    if task.config.alignment.steps:
        phases.insert(0, partial(_alignment_phase, task, opened))
    Trainer(task, group, opened.device, on_record).run(phases, should_stop)


def _alignment_phase(task: TrainTask, opened: OpenedTask) -> Phase:
    config, start, source = task.config, opened.start, opened.source
    settings, adapter = config.alignment, start.adapter
    if task.new_adapter and settings.adapter_init == "clusters" and isinstance(adapter, CompressionAdapter):
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
        complete=source.with_features,
        unreadable=source.features.unreadable,
    )


def _joint_phase(task: TrainTask, opened: OpenedTask, group: WorkerGroup) -> Phase:
    config, start, source = task.config, opened.start, opened.source
    if not config.optimizer.adapter_lr_factor:  # unused gradients would cost time and count in the norm
        start.adapter.requires_grad_(False)
    per_epoch = steps_per_epoch(config.loop, source.data.pairs(config.loop.epoch_of))
    return Phase(
        name=JOINT,
        stage=1 if config.alignment.steps else 0,
        module=JointObjective(
            start.adapter, start.joint, config.objective, config.augmentation, opened.teacher, group.gather
        ),
        batch=source.joint,
        steps=task.steps,
        accumulate=config.loop.accumulate,
        images=config.loop.batch_size * config.loop.accumulate,
        learning_rate=partial(
            learning_rate,
            total_steps=task.steps,
            steps_per_epoch=per_epoch,
            peak=config.optimizer.lr,
            config=config.optimizer,
        ),
        optimizer=config.optimizer,
        evaluation=dev_evaluation(task, opened, per_epoch),
        complete=source.with_features,
        unreadable=source.features.unreadable,
    )
