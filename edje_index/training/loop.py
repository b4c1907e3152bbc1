"""Runs the training of one worker: opens the files of the training run, and runs the
optimiser steps of the alignment phase and of the joint phase.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.adapter import CompressionAdapter
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.scoring.parts import content_token_mask
from edje_index.scoring.weights import LOGIT, ScoreWeights
from edje_index.training.batches import BatchSource, to_device
from edje_index.training.checkpoints import (
    DEV,
    RECALL,
    Checkpoints,
    TrainState,
    append_record,
    begin_log,
)
from edje_index.training.config import LoopConfig, OptimizerConfig, TrainSettings
from edje_index.training.dataset import (
    CaptionedRows,
    StoredFeatures,
    TrainingData,
    prepare_captions,
)
from edje_index.training.dev import dev_pools
from edje_index.training.random_streams import CLUSTERING, DROPOUT, stream
from edje_index.training.start import init_queries, make_trainable, trained_part
from edje_index.training.step import AlignmentObjective, JointObjective, Teacher
from edje_index.training.workers import WorkerGroup
from storage_formats.arrays import Ints
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.threads import ordered_map

CAPTIONS = "captions"
ALIGNMENT = "alignment"
JOINT = "joint"
BETAS = (0.9, 0.999)
MAX_BAD_STEPS = 10
"""Training fails if the gradients of this many steps in a row are not finite.

A phase also fails if it ends with at least two such steps in a row, and these are more
than 1 % of the steps of the phase. A phase of a single step fails if the gradients of
this step are not finite.
"""
Record = dict[str, Any]
# warm-up steps as a fraction of the alignment steps
_ALIGNMENT_WARMUP = 0.1
# number of batches that are made in advance
_AHEAD = 2
# Number of sample images. The queries of a new adapter start at cluster centres of the
# patch features of these images.
_SAMPLE_IMAGES = 300


class TrainingStopped(EdjeError):
    """The training run was stopped on request. Its finished work was saved first."""


@dataclass(frozen=True)
class TrainTask:
    """Everything that a train worker needs. A task can be sent to another process,
    because all of its values can be pickled.

    Attributes:
        run: fingerprint of the settings, data and initial weights of the training run.
        start: path of the initial bundle.
        items: the training images.
        steps: number of optimiser steps of the joint phase.
        new_adapter: True if the adapter in `start` has random weights.
        miner: path of the bundle of the mining model; None if the frozen towers mine
            hard negatives.
        mining: index that `miner` built, and the row of each training image in this
            index, int64 [n]. None if the frozen towers mine hard negatives.
        teacher: path of the bundle of the teacher; None without distillation.
        teacher_tokens: index with the teacher's tokens, and the row of each training
            image in this index, int64 [n]. None if the teacher's adapter computes the
            tokens from the features of the batch.
        continued: run folder, fingerprint and last step of the training run that this
            run continues, with the same optimiser state and number of epochs; None for
            a new optimiser.
        dev: the dev images; None without a dev set.
    """

    config: TrainSettings
    run: str
    start: Path
    items: CaptionedRows
    steps: int
    new_adapter: bool = True
    miner: Path | None = None
    mining: tuple[CommittedIndex, Ints] | None = None
    teacher: Path | None = None
    teacher_tokens: tuple[CommittedIndex, Ints] | None = None
    continued: tuple[Path, str, int] | None = None
    dev: CaptionedRows | None = None

    @property
    def data(self) -> Path:
        """The file of the `TrainingData` of the training images."""
        return self.config.run.folder / "train.npy"

    @property
    def dev_data(self) -> Path:
        """The file of the `TrainingData` of the dev images."""
        return self.config.run.folder / "dev.npy"


def open_start(
    task: TrainTask, group: WorkerGroup, device: torch.device
) -> tuple[ModelBundle, BatchSource]:
    """Return the bundle with the initial weights, and the source of the batches of this
    worker, which trains on `device`.
    """
    config = task.config
    start = ModelBundle.load(task.start, verify=False)
    tokens = start.block_shape[0]
    on_gpu = device.type == "cuda"
    source = BatchSource(
        data=TrainingData.open(task.data, task.items, task.mining),
        features=StoredFeatures(task.items.index),
        tokenizer=start.joint.tokenizer,
        image_tokens=min(config.loop.step_tokens or tokens, tokens),
        config=config,
        rank=group.rank,
        world_size=group.size,
        chunk_pairs=config.run.chunk_pairs or (128 if on_gpu else 64),
        on_gpu=on_gpu,
    )
    return start, source


def run_worker(
    task: TrainTask,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_record: Callable[[Record], None] = lambda _: None,
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
        TrainingStopped: `should_stop` returned True.
        ModelError: the training diverged, or a step needs more memory than the device
            has.
    """
    run_dir = task.config.run.folder
    config = task.config
    if config.run.threads is not None or group.size > 1:
        torch.set_num_threads(config.run.threads or 1)
    device = resolve_device(config.run.device)

    def write(record: Record) -> None:
        if group.rank == 0:
            append_record(run_dir, record)
            on_record(record)

    def report_shard(done: int, shards: int) -> None:
        if done < shards:
            write({"stage": -1, "phase": CAPTIONS, "step": done, "steps": shards})

    prepared = [(task.data, task.items, task.miner)]
    if task.dev is not None:
        prepared.append((task.dev_data, task.dev, None))
    for path, items, miner in prepared:
        if not prepare_captions(
            path, items, task.start, miner, device, group, should_stop, report_shard
        ):
            raise TrainingStopped(
                "the training run stopped while preparing captions; finished shards are"
                " kept"
            )
    start, source = open_start(task, group, device)
    teacher = None
    if task.teacher is not None:
        bundle = ModelBundle.load(task.teacher, verify=False)
        tokens = None
        if task.teacher_tokens is not None:
            tokens = StoredFeatures(task.teacher_tokens[0]), task.teacher_tokens[1]
        teacher = Teacher(
            bundle.joint, None if tokens else trained_part(bundle.adapter), device
        )
        source = replace(source, teacher_tokens=bundle.block_shape[0], teacher=tokens)
    make_trainable(start, config.architecture, device)
    state = Checkpoints(run_dir, task.run).latest()
    # Wait until all workers have read the checkpoint, before worker 0 writes another.
    group.any(False)

    def evaluate() -> dict[str, float]:
        """Return the R@1 of each direction on the dev captions, and the mean of both.
        As in the published code, candidates are sorted by the logit alone.
        """
        assert task.dev is not None
        start.adapter.eval()
        start.joint.eval()
        dev = (task.dev, task.dev_data)
        pools = dev_pools(start, dev, config.fitting, (LOGIT,))
        recalls = {
            direction: float(of_direction.hits(ScoreWeights()).mean())
            for direction, of_direction in pools.items()
        }
        return {**recalls, RECALL: sum(recalls.values()) / len(recalls)}

    common = (task, group, device, should_stop, write)
    with torch.random.fork_rng(
        [torch.cuda.current_device()] if device.type == "cuda" else []
    ):
        if config.alignment.steps and (state is None or state.stage == 0):
            settings = config.alignment
            adapter = start.adapter
            if task.new_adapter and isinstance(adapter, CompressionAdapter):
                order = stream(config.loop.seed, CLUSTERING)
                images = np.sort(order.permutation(source.data.images)[:_SAMPLE_IMAGES])
                init_queries(
                    adapter,
                    source.features.fetch(task.items.rows[images]),
                    torch.Generator().manual_seed(config.loop.seed),
                )
            warmup = int(settings.steps * _ALIGNMENT_WARMUP)
            changes = {
                "lr": settings.lr,
                "decay": "cosine",
                "warmup_steps": warmup,
                "adapter_lr_factor": 1.0,
            }
            _run_phase(
                *common,
                state,
                name=ALIGNMENT,
                stage=0,
                module=AlignmentObjective(adapter, start.joint),
                make_batch=source.alignment(content_token_mask(start.joint.tokenizer)),
                steps=settings.steps,
                images=min(settings.batch_size, source.data.images),
                optimization=config.optimizer.model_copy(update=changes),
                steps_per_epoch=1,
            )
        # A frozen adapter needs no gradients. They would take time to compute, and
        # would be part of the gradient norm.
        if not config.optimizer.adapter_lr_factor:
            start.adapter.requires_grad_(False)
        steps_per_epoch = len(source.data.records) // config.loop.batch_size
        every = config.run.evaluate_every
        if every is None:
            every = steps_per_epoch
        previous = None
        if task.continued is not None:
            folder, run, last = task.continued
            previous = Checkpoints(folder, run).at(last)
        _run_phase(
            *common,
            state,
            name=JOINT,
            stage=1 if config.alignment.steps else 0,
            module=JointObjective(
                start.adapter,
                start.joint,
                config.objective,
                config.loop.step_tokens,
                teacher,
                group.gather,
            ),
            make_batch=source.joint,
            steps=task.steps,
            images=config.loop.batch_size,
            optimization=config.optimizer,
            steps_per_epoch=steps_per_epoch,
            previous=previous,
            evaluate=evaluate,
            evaluate_every=0 if task.dev is None else every,
        )


def _run_phase(
    task: TrainTask,
    group: WorkerGroup,
    device: torch.device,
    should_stop: Callable[[], bool],
    write: Callable[[Record], None],
    state: TrainState | None,
    *,
    name: str,
    stage: int,
    module: AlignmentObjective | JointObjective,
    make_batch: Callable[[int], Any],
    steps: int,
    images: int,
    optimization: OptimizerConfig,
    steps_per_epoch: int,
    previous: TrainState | None = None,
    evaluate: Callable[[], dict[str, float]] = dict,
    evaluate_every: int = 0,
) -> None:
    """Run the phase `name`. If `state`, the last checkpoint, belongs to this phase, run
    only the steps after this checkpoint.

    Args:
        write: adds a record to the log, on worker 0.
        stage: number of the phase, counted from 0.
        module: module to train.
        make_batch: makes a batch from the batch number, which counts from 0 in each
            phase.
        images: number of images per optimiser step, over all workers.
        steps_per_epoch: number of optimiser steps per epoch. It has no effect on the
            cosine decay of the alignment phase.
        previous: last checkpoint of the training run that this phase continues; None
            for a new optimiser.
        evaluate: returns recalls by name. It is called every `evaluate_every` steps, or
            never if `evaluate_every` is 0.
    """
    first = 0
    skipped = 0
    skips_in_row = 0
    run_dir = task.config.run.folder
    loop = task.config.loop
    run = task.config.run
    resumed = state if state is not None and state.stage == stage else None
    if resumed is not None:
        module.load_state_dict(resumed.weights)
        first = resumed.step
    module = module.to(device).train()
    optimizer = make_optimizer(module, optimization)
    epochs_before = None
    if previous is not None:
        epochs_before = int(previous.epochs)
        continue_optimizer(optimizer, previous.optimizer)
    if resumed is not None:
        try:
            optimizer.load_state_dict(resumed.optimizer)
        except ValueError as error:
            raise ModelError(
                f"the optimiser state in the checkpoint of step {first} does not fit"
                f" the parameters ({error}); resume with the version of edje-index that"
                " wrote the checkpoint, or use another run folder"
            ) from error
        skipped, skips_in_row = resumed.skipped
    if group.rank == 0:
        begin_log(run_dir, stage, first)

    # sums of the losses since the last log record
    sums: Any = Counter()
    started = time.monotonic()
    waited = 0.0
    since = first
    dtype = resolve_dtype(loop.dtype, device)
    on_device = batches_on_device(make_batch, device)
    batches = ordered_map(on_device, range(first, steps), 1, 1 + _AHEAD)
    with contextlib.closing(batches):
        for step in range(first, steps):
            rate = learning_rate(
                step, steps, steps_per_epoch, optimization, epochs_before
            )
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate * parameters["factor"]
            waiting_since = time.monotonic()
            batch = next(batches)
            waited += time.monotonic() - waiting_since
            # Dropout and the choice of tokens use torch's random numbers. The seed is
            # set in each step, so that a resumed training run draws the same numbers.
            dropout = stream(loop.seed, DROPOUT, stage, step, group.rank)
            torch.manual_seed(int(dropout.integers(2**63)))
            try:
                losses = module.backward(batch, dtype)
            except torch.OutOfMemoryError as error:
                raise ModelError(
                    f"step {step + 1} of the {name} phase needs more memory than the"
                    " device has; lower run.chunk_pairs, or alignment.batch_size in the"
                    " alignment phase, and train again"
                ) from error
            trained = [part for part in module.parameters() if part.grad is not None]
            gradients = [part.grad for part in trained if part.grad is not None]
            group.average(gradients)
            norm = nn.utils.get_total_norm(gradients)
            if optimization.clip_norm:
                nn.utils.clip_grads_with_norm_(trained, optimization.clip_norm, norm)
            is_bad = group.any(not bool(torch.isfinite(norm)))
            if not is_bad:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            sums.update({**losses, "gradient": norm})
            skipped += is_bad
            skips_in_row = skips_in_row + 1 if is_bad else 0
            done = step + 1
            # A short phase may end before `MAX_BAD_STEPS` steps in a row are skipped.
            # So a phase also fails if it ends with more than `few` skipped steps.
            few = max(steps // 100, min(steps - 1, 1))
            has_diverged = done == steps and skips_in_row > few
            if has_diverged or skips_in_row >= MAX_BAD_STEPS:
                raise ModelError(
                    f"{skips_in_row} steps in a row had no finite gradient, up to step"
                    f" {done} of the {name} phase; train again in a new run folder with"
                    " a lower optimizer.lr, a higher optimizer.warmup_steps, or"
                    " loop.dtype float32"
                )
            position = {"stage": stage, "phase": name, "step": done, "steps": steps}
            stop = group.any(should_stop())
            is_evaluated = evaluate_every > 0 and done % evaluate_every == 0
            if is_evaluated:
                if group.rank == 0:
                    write({**position, "phase": DEV, **evaluate()})
                    module.train()
                # The other workers wait here while worker 0 evaluates.
                group.any(False)
            # The first step is logged too, so that a progress display can estimate the
            # remaining time.
            if done % run.log_every == 0 or done in (first + 1, steps):
                means = group.mean(
                    {loss: total / (done - since) for loss, total in sums.items()}
                )
                seconds = time.monotonic() - started
                write(
                    {
                        **position,
                        "lr": rate,
                        **means,
                        "images_per_second": (done - since) * images / seconds,
                        "step_seconds": seconds / (done - since),
                        "seconds": seconds,
                        "data_wait": waited,
                        "skipped": skipped,
                    }
                )
                sums = Counter()
                started = time.monotonic()
                waited = 0.0
                since = done
            keeps = is_evaluated and run.keep_best > 0
            if stop or keeps or done % run.checkpoint_every == 0 or done == steps:
                if group.rank == 0:
                    weights = {
                        key: tensor.detach().cpu()
                        for key, tensor in module.state_dict().items()
                    }
                    epochs = round((epochs_before or 0) + done / steps_per_epoch, 6)
                    saved = TrainState(
                        task.run,
                        stage,
                        done,
                        epochs,
                        weights,
                        optimizer.state_dict(),
                        (skipped, skips_in_row),
                    )
                    Checkpoints(run_dir, task.run).save(saved, run.keep_best)
                # The other workers wait until the checkpoint is written.
                group.any(False)
            if stop and done < steps:
                raise TrainingStopped(
                    f"the training run stopped after step {done} of {steps} of the"
                    f" {name} phase"
                )


def batches_on_device(
    make_batch: Callable[[int], Any], device: torch.device
) -> Callable[[int], Any]:
    """Return a function that makes the same batches as `make_batch`, on `device`.

    On CUDA, the thread that calls the function copies a batch to the device while the
    device still computes earlier steps. The caller must keep a batch until all work on
    it is done, because the memory of a released batch may be overwritten.
    """
    if device.type == "cpu":
        return make_batch
    # The current device differs between threads, so the stream is made for `device`.
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make(number: int) -> Any:
        with torch.cuda.stream(stream):
            batch = to_device(make_batch(number), stream.device)
        stream.synchronize()
        return batch

    return make


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return an AdamW optimiser for the trainable parameters of `module`.

    Each parameter group has a ``factor``, by which the training loop multiplies the
    learning rate. The factor of the adapter is ``config.adapter_lr_factor``. The factor
    of all other parameters is 1.
    """
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            factor = config.adapter_lr_factor if name.startswith("adapter.") else 1.0
            groups.setdefault(factor, []).append((name, parameter))
    return torch.optim.AdamW(
        [
            {"params": parameters, "factor": factor}
            for factor, parameters in groups.items()
        ],
        lr=config.warmup_lr,
        betas=BETAS,
        weight_decay=config.weight_decay,
        fused=True,
    )


def continue_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Copy Adam's moments from `state`, the state of another optimiser, into
    `optimizer`. Only parameters with the same name and shape in both are changed.
    """
    moments = {
        name: state["state"].get(number)
        for group in state["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            copied = moments.get(name)
            if copied is not None and copied["exp_avg"].shape == parameter.shape:
                optimizer.state[parameter] = {
                    key: tensor.to(parameter.device) for key, tensor in copied.items()
                }


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
    done = (step - warmup) / max(1, total_steps - warmup)
    return floor + (config.lr - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
