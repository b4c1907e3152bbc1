"""Runs the training of one worker: opens the files of the training run, and runs the
optimiser steps of the alignment phase and of the joint phase. At the end, makes a
bundle from the last checkpoint, and fits the final score of the bundle.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.devices import resolve_device, resolve_dtype, to_bf16_array
from edje_index.progress import OnProgress
from edje_index.scoring.weights import (
    DIRECTIONS,
    LOGIT,
    TEXT_TO_IMAGE,
    DirectionWeights,
    ScoreWeights,
)
from edje_index.training.batches import (
    DROPOUT,
    BatchSource,
    stream,
    to_device,
)
from edje_index.training.checkpoints import (
    TrainState,
    append_record,
    begin_log,
    last_checkpoint,
    read_log,
    save_checkpoint,
)
from edje_index.training.config import LoopConfig, OptimizerConfig, TrainSettings
from edje_index.training.dataset import TrainingData, prepare_captions
from edje_index.training.fit_weights import WeightChoice, choose_weights, dev_pools
from edje_index.training.pooled_similarity import fit_pooled_similarity
from edje_index.training.start import make_trainable, trained_part
from edje_index.training.step import AlignmentObjective, JointObjective
from edje_index.training.workers import WorkerGroup
from storage_formats.atomic import Json
from storage_formats.errors import TaskInterrupted, UsageError
from storage_formats.format.offset import estimate_offset
from storage_formats.threads import ordered_map

CAPTIONS = "captions"
ALIGNMENT = "alignment"
JOINT = "joint"
MAX_BAD_STEPS = 10
"""Training fails if the gradients of this many steps in a row, or of all steps of a
shorter phase, are not finite.
"""
# warm-up steps as a fraction of the alignment steps
_ALIGNMENT_WARMUP = 0.1
# number of batches that are made in advance
_AHEAD = 2
# Number of training images from which the offset block, the mean of their blocks, is
# estimated. The noise of a mean of n blocks adds about the fraction 1/n to the squared
# error of quantized tokens.
_OFFSET_IMAGES = 256


@dataclass(frozen=True)
class TrainTask:
    """Everything that a train worker needs. A task can be sent to another process,
    because all of its values can be pickled.

    Attributes:
        run: fingerprint of the settings, data and initial weights of the training run.
        start: path of the initial bundle.
        data: the training images and their captions.
        dev: the dev images and their captions; None without a dev set.
        continued: run folder and fingerprint of the training run that this run
            continues, with the same optimiser state and number of epochs; None for a
            new optimiser.
    """

    config: TrainSettings
    run: str
    start: Path
    data: TrainingData
    dev: TrainingData | None = None
    continued: tuple[Path, str] | None = None


def run_worker(
    task: TrainTask,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_record: Callable[[Json], None] = lambda _: None,
) -> None:
    """Run `task` on this worker. If there is a checkpoint, training continues from the
    last checkpoint.

    Args:
        group: rank of this worker, and number of workers.
        should_stop: called after every step, and while captions are prepared. If the
            result is True, the run saves a checkpoint, or keeps the finished shards of
            captions, and stops.
        on_record: called with every log record, only on worker 0.

    Raises:
        TaskInterrupted: `should_stop` returned True. Finished work was saved first.
        ModelError: the training diverged, or a step needs more memory than the device
            has.
    """
    config = task.config
    loop = config.loop
    run = config.run
    data = task.data
    dev = task.dev
    if run.threads is not None or group.size > 1:
        torch.set_num_threads(run.threads or 1)
    # This device has a number. The current device differs between threads.
    device = torch.empty(0, device=resolve_device(run.device)).device

    def write(phase: str, step: int, steps: int, **more: Any) -> None:
        """Add a record to the log, on worker 0."""
        if group.rank == 0:
            record = {"phase": phase, "step": step, "steps": steps, **more}
            append_record(run.folder, record)
            on_record(record)

    def stop_evaluation(*_progress: object) -> None:
        if should_stop():
            raise TaskInterrupted

    for captioned in (data, dev):
        if captioned is not None:
            report = partial(write, CAPTIONS)
            prepare_captions(captioned, task.start, device, group, should_stop, report)
    start = ModelBundle.load(task.start, verify=False)
    teacher = None
    teacher_tokens = 0
    if config.inputs.teacher is not None:
        teacher = ModelBundle.load(config.inputs.teacher, verify=False)
        teacher.adapter.to(device)
        teacher.joint.to(device)
        teacher_tokens = teacher.block_shape[0]
    tokens = start.block_shape[0]
    source = BatchSource(
        data=data,
        tokenizer=start.joint.tokenizer,
        image_tokens=min(loop.step_tokens or tokens, tokens),
        config=config,
        group=group,
        teacher_tokens=teacher_tokens,
    )
    make_trainable(start, config.architecture, device)
    dtype = resolve_dtype(loop.dtype, device)
    state = last_checkpoint(run.folder, task.run)
    # Wait until all workers have read the checkpoint, before worker 0 writes another.
    group.any(False)
    phases = [JOINT]
    if config.alignment.steps and (state is None or state.phase == ALIGNMENT):
        phases = [ALIGNMENT, JOINT]
    cuda_devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda_devices):
        for phase in phases:
            # The last checkpoint of the run that this phase continues, and its number
            # of epochs.
            previous = None
            epochs_before = None
            # steps after which the dev recall is measured
            evaluated = range(0)
            module: AlignmentObjective | JointObjective
            make_batch: Callable[[int], Any]
            if phase == ALIGNMENT:
                alignment = config.alignment
                module = AlignmentObjective(start.adapter, start.joint)
                make_batch = source.alignment
                steps = alignment.steps
                images = min(alignment.batch_size, data.images)
                # This number has no effect on the cosine decay.
                steps_per_epoch = 1
                changes = {
                    "lr": alignment.lr,
                    "decay": "cosine",
                    "warmup_steps": int(steps * _ALIGNMENT_WARMUP),
                    "adapter_lr_factor": 1.0,
                }
                settings = config.optimizer.model_copy(update=changes)
            else:
                settings = config.optimizer
                # A frozen adapter needs no gradients. They would take time to compute,
                # and would be part of the gradient norm.
                if not settings.adapter_lr_factor:
                    start.adapter.requires_grad_(False)
                module = JointObjective(
                    start.adapter,
                    start.joint,
                    config.objective,
                    loop.step_tokens,
                    teacher,
                    group.gather,
                )
                make_batch = source.joint
                steps = total_steps(loop, len(data.records))
                images = loop.batch_size
                steps_per_epoch = len(data.records) // images
                if dev:
                    every = run.evaluate_every or steps_per_epoch
                    evaluated = range(every, steps + 1, every)
                if task.continued is not None:
                    previous = last_checkpoint(*task.continued)
            module.to(device).train()
            optimizer = make_optimizer(module, settings)
            if previous is not None:
                load_optimizer(optimizer, previous)
                epochs_before = previous.epochs
            first = 0
            if state is not None and state.phase == phase:
                module.load_state_dict(state.weights)
                load_optimizer(optimizer, state)
                first = state.step
            if group.rank == 0:
                begin_log(run.folder, phase, first)

            # sums of the losses since the last log record
            sums: Any = Counter()
            begun = time.monotonic()
            started = begun
            waited = 0.0
            since = first
            bad_steps = 0

            def on_device(number: int, make: Callable[[int], Any] = make_batch) -> Any:
                return to_device(make(number), device)

            batches = ordered_map(on_device, range(first, steps), 1, 1 + _AHEAD)
            with contextlib.closing(batches):
                for step in range(first, steps + 1):
                    # The evaluation comes after the checkpoint of `step`. If it was
                    # stopped, a resumed run goes on with it.
                    if dev and step in evaluated:
                        stop = False
                        is_logged = any(
                            record["step"] == step and "dev_t2i_r1" in record
                            for record in read_log(run.folder)
                        )
                        if group.rank == 0 and not is_logged:
                            start.adapter.eval()
                            start.joint.eval()
                            # As in the published code, candidates are sorted by the
                            # logit alone.
                            try:
                                pools = dev_pools(
                                    start,
                                    dev,
                                    config.fitting,
                                    run.folder,
                                    f"{task.run} {step}",
                                    (LOGIT,),
                                    stop_evaluation,
                                )
                            except TaskInterrupted:
                                stop = True
                            else:
                                recalls = {
                                    f"dev_{direction}_r1": float(
                                        of_direction.hits(ScoreWeights()).mean()
                                    )
                                    for direction, of_direction in pools.items()
                                }
                                write(phase, step, steps, **recalls)
                            module.train()
                        # The other workers wait here while worker 0 evaluates.
                        if group.any(stop):
                            raise TaskInterrupted(
                                "the training run stopped during the evaluation after"
                                f" step {step} of {steps}"
                            )
                    if step == steps:
                        break
                    rate = learning_rate(
                        step,
                        steps,
                        steps_per_epoch,
                        settings,
                        epochs_before,
                    )
                    adapter, others = optimizer.param_groups
                    adapter["lr"] = rate * settings.adapter_lr_factor
                    others["lr"] = rate
                    waiting_since = time.monotonic()
                    batch = next(batches)
                    waited += time.monotonic() - waiting_since
                    # Dropout and the choice of tokens use torch's random numbers. The
                    # seed is set in each step, so that a resumed training run draws the
                    # same numbers.
                    dropout = stream(loop.seed, DROPOUT, step, group.rank)
                    torch.manual_seed(int(dropout.integers(2**63)))
                    try:
                        losses = module.backward(batch, dtype)
                    except torch.OutOfMemoryError as error:
                        raise ModelError(
                            f"a step of the {phase} phase needs more memory than the"
                            " device has; lower run.chunk_pairs, or"
                            " alignment.batch_size in the alignment phase, and train"
                            " again"
                        ) from error
                    trained = [
                        part for part in module.parameters() if part.grad is not None
                    ]
                    gradients = [part.grad for part in trained if part.grad is not None]
                    group.average(gradients)
                    norm = nn.utils.get_total_norm(gradients)
                    if settings.clip_norm:
                        nn.utils.clip_grads_with_norm_(
                            trained, settings.clip_norm, norm
                        )
                    # A step whose gradient is not finite is skipped.
                    is_bad = group.any(not torch.isfinite(norm))
                    if not is_bad:
                        optimizer.step()
                    optimizer.zero_grad()
                    skipped = norm.new_tensor(is_bad)
                    sums.update({**losses, "gradient": norm, "skipped": skipped})
                    bad_steps = bad_steps + 1 if is_bad else 0
                    done = step + 1
                    if bad_steps >= min(MAX_BAD_STEPS, steps):
                        raise ModelError(
                            f"{bad_steps} steps in a row had no finite gradient, up to"
                            f" step {done} of the {phase} phase; train again in a new"
                            " run folder with a lower optimizer.lr, a higher"
                            " optimizer.warmup_steps, or loop.dtype float32"
                        )
                    stop = group.any(should_stop())
                    # The first step is logged too, so that a progress display can
                    # estimate the remaining time.
                    if done % run.log_every == 0 or done in (first + 1, steps):
                        count = done - since
                        now = time.monotonic()
                        # This includes the time of evaluations.
                        step_seconds = (now - begun) / (done - first)
                        write(
                            phase,
                            done,
                            steps,
                            lr=rate,
                            **group.mean({name: sums[name] / count for name in sums}),
                            images_per_second=count * images / (now - started),
                            data_wait=waited / (now - started),
                            minutes_left=step_seconds * (steps - done) / 60,
                        )
                        sums = Counter()
                        started = now
                        waited = 0.0
                        since = done
                    is_due = done % run.checkpoint_every == 0 or done in evaluated
                    if stop or is_due or done == steps:
                        if group.rank == 0:
                            epochs = (epochs_before or 0) + done // steps_per_epoch
                            weights = {
                                name: part.cpu()
                                for name, part in module.state_dict().items()
                            }
                            # A name would keep the state of the optimiser in memory
                            # during the next phase.
                            save_checkpoint(
                                run.folder,
                                TrainState(
                                    task.run,
                                    phase,
                                    done,
                                    epochs,
                                    weights,
                                    optimizer.state_dict(),
                                ),
                            )
                        # The other workers wait until the checkpoint is written.
                        group.any(False)
                    if stop and done < steps:
                        raise TaskInterrupted(
                            f"the training run stopped after step {done} of {steps} of"
                            f" the {phase} phase"
                        )


def make_optimizer(
    module: AlignmentObjective | JointObjective, config: OptimizerConfig
) -> torch.optim.AdamW:
    """Return an AdamW optimiser with two parameter groups: the adapter, and all other
    parameters of `module`.

    Its betas are torch's default values, 0.9 and 0.999, as in the published code. AdamW
    changes only parameters that have a gradient. Frozen parameters, and heads
    that no loss uses, therefore have no weight decay.
    """
    others = [
        parameter
        for name, parameter in module.named_parameters()
        if not name.startswith("adapter.")
    ]
    return torch.optim.AdamW(
        [{"params": [*module.adapter.parameters()]}, {"params": others}],
        weight_decay=config.weight_decay,
        fused=True,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    """Load Adam's moments from a checkpoint. The weight decay does not change.

    Raises:
        ModelError: the checkpoint is that of a model with other parameters.
    """
    decay = optimizer.defaults["weight_decay"]
    try:
        optimizer.load_state_dict(state.optimizer)
        is_same = all(
            moments["exp_avg"].shape == parameter.shape
            for parameter, moments in optimizer.state.items()
        )
    except ValueError:
        is_same = False
    if not is_same:
        raise ModelError(
            f"the optimiser state of the checkpoint after step {state.step} does not"
            " fit the parameters; use the architecture and the version of edje-index"
            " of the run that wrote it, or start without it: in another run folder, or"
            " with optimizer.continued false"
        )
    for parameters in optimizer.param_groups:
        parameters["weight_decay"] = decay


def total_steps(config: LoopConfig, pairs: int) -> int:
    """Return the number of optimiser steps of the joint phase.

    Args:
        config: settings of the training loop, with the number of steps or epochs.
        pairs: number of pairs per epoch.
    """
    if pairs < config.batch_size:
        raise UsageError(
            f"{pairs} captions do not fill a batch of {config.batch_size}; lower"
            " loop.batch_size"
        )
    steps_per_epoch = pairs // config.batch_size
    return config.steps or max(1, math.ceil((config.epochs or 0) * steps_per_epoch))


def learning_rate(
    step: int,
    total_steps: int,
    steps_per_epoch: int,
    config: OptimizerConfig,
    epochs_before: int | None = None,
) -> float:
    """Return the learning rate of optimiser step `step`, counted from 0.

    During warm-up, the learning rate rises linearly from `config.warmup_lr` to
    `config.lr`. After warm-up, `config.decay` selects the learning rate:

    - "epoch": ``max(config.min_lr, config.lr * config.decay_rate ** finished_epochs)``.
      The finished epochs include `epochs_before`, the epochs of the training run that
      this run continues.
    - "cosine": the learning rate falls along a cosine to `config.min_lr` at the last
      step.

    If `config.min_lr` is higher than `config.lr`, both decays use `config.lr` instead
    of `config.min_lr`. A run that continues another run has no warm-up. For other runs,
    `epochs_before` is None.
    """
    warmup = config.warmup_steps if epochs_before is None else 0
    # As in the published code, warm-up with the decay "epoch" ends after the first
    # epoch at the latest.
    if step < warmup and (step < steps_per_epoch or config.decay == "cosine"):
        return config.warmup_lr + (config.lr - config.warmup_lr) * step / warmup
    floor = min(config.min_lr, config.lr)
    if config.decay == "epoch":
        epoch = (epochs_before or 0) + step // steps_per_epoch
        return max(floor, config.lr * config.decay_rate**epoch)
    share = (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup))) / 2
    return floor + (config.lr - floor) * share


def finish_model(
    task: TrainTask, on_progress: OnProgress
) -> tuple[ModelBundle, int, dict[str, WeightChoice]]:
    """Make a bundle from the checkpoint of the finished joint phase, and fit its final
    score with the settings in ``task.config.fitting``.

    The weights of the final score are fitted to the dev captions. Without dev captions,
    they are those of the initial bundle, see `make_start`.

    Args:
        on_progress: called with the activity and its progress. An exception raised by
            `on_progress` stops this function.

    Returns:
        The trained bundle, which is not saved yet; the number of finished steps of the
        joint phase; and the fitted weights and the recall of each direction. The last
        value is empty if no weights were fitted.
    """
    fitting = task.config.fitting
    # The workers may have used a GPU that this process does not have. In this case, the
    # CPU is used.
    cuda = torch.cuda.is_available()
    device = resolve_device(task.config.run.device if cuda else "cpu")
    bundle = ModelBundle.load(task.start, device=str(device), verify=False)
    data = task.data
    state = last_checkpoint(task.config.run.folder, task.run)
    assert state is not None
    adapter = trained_part(bundle.adapter)
    # The names are those of `JointObjective`.
    trained = nn.ModuleDict({"adapter": adapter, "joint": bundle.joint})
    trained.load_state_dict(state.weights)
    bundle.trained = True
    bundle.info = None
    bundle.adapter.eval()
    bundle.joint.eval()
    # The offset block is estimated from evenly spaced training images.
    images = np.arange(0, data.images, max(1, data.images // _OFFSET_IMAGES))
    tokens = data.iter_tokens(adapter, images, device)
    bundle.offset = estimate_offset(map(to_bf16_array, tokens))
    if fitting.pooled_dim:
        seed = task.config.loop.seed
        pooled = fit_pooled_similarity(
            adapter, bundle.joint, data, seed, fitting.pooled_dim, on_progress
        )
        bundle.pooled = pooled.to(device).eval()
    choices = dict[str, WeightChoice]()
    if task.dev is not None:
        pools = dev_pools(
            bundle,
            task.dev,
            fitting,
            task.config.run.folder,
            f"{task.run} {state.step}",
            on_progress=on_progress,
        )
        choices = {name: choose_weights(pools[name]) for name in DIRECTIONS}
        bundle.score = DirectionWeights(
            **{direction: choice.weights for direction, choice in choices.items()}
        )
        bundle.logit_range = choices[TEXT_TO_IMAGE].logit_range
    return bundle, state.step, choices
