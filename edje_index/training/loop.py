"""The training loop of one worker: runs the optimiser steps of both phases, from the last checkpoint on."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edje_index.errors import ModelError
from edje_index.models.adapter import CompressionAdapter
from edje_index.models.devices import autocast, resolve_dtype
from edje_index.scoring.parts import content_token_mask
from edje_index.training.checkpoints import DEV, RECALL, Checkpoints, TrainLog, TrainState, best_steps, read_log
from edje_index.training.config import LoopConfig, OptimizerConfig
from edje_index.training.dev import DevSet, dev_recalls
from edje_index.training.random_streams import DROPOUT, stream
from edje_index.training.start import init_from_features, make_trainable
from edje_index.training.step import TOTAL, AlignmentObjective, JointObjective
from edje_index.training.task import OpenedTask, TrainTask, WorkerGroup, open_task
from storage_formats.errors import EdjeError, UsageError

ALIGNMENT, JOINT = "alignment", "joint"
BETAS = (0.9, 0.999)
Record = dict[str, Any]
_Item = TypeVar("_Item")
_ALIGNMENT_WARMUP = 0.1  # warm-up steps as a fraction of the alignment steps
_AHEAD = 2  # batches that are made ahead


class TrainingStopped(EdjeError):
    """The training run was stopped on request. A checkpoint was saved first."""


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
        ModelError: ``loop.max_bad_steps`` steps in a row had no finite gradient, or the checkpoints cannot be used.
        EdjeError: the device or a file cannot be used.
    """
    config = task.config
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    opened = open_task(task, group)
    start, source = opened.start, opened.source
    make_trainable(start, config.architecture, opened.device)
    trainer = _Trainer(task, opened, group, should_stop, on_record)
    state = trainer.checkpoints.latest()
    group.barrier()  # no worker writes a checkpoint while another worker still reads one
    with torch.random.fork_rng():
        if config.alignment.steps and (state is None or state.stage == 0):
            settings, adapter = config.alignment, start.adapter
            if task.new_adapter and isinstance(adapter, CompressionAdapter):
                init_from_features(adapter, source.features, source.data, config.loop.seed)
            warmup = int(settings.steps * _ALIGNMENT_WARMUP)
            changes = {"lr": settings.lr, "decay": "cosine", "warmup_steps": warmup, "adapter_lr_factor": 1.0}
            trainer.run(
                Phase(
                    name=ALIGNMENT,
                    stage=0,
                    module=AlignmentObjective(adapter, start.joint, config.augmentation),
                    batch=source.alignment(content_token_mask(start.joint.tokenizer)),
                    steps=settings.steps,
                    accumulate=1,
                    images=min(settings.batch_size, source.data.images),
                    optimizer=config.optimizer.model_copy(update=changes),
                    steps_per_epoch=1,
                ),
                state,
            )
        if not config.optimizer.adapter_lr_factor:  # unused gradients would cost time and count in the norm
            start.adapter.requires_grad_(False)
        per_epoch = steps_per_epoch(config.loop, source.data.pairs(config.loop.epoch_of))
        every = config.run.evaluate_every
        if every is None:
            every = max(1, round(per_epoch))
        trainer.run(
            Phase(
                name=JOINT,
                stage=1 if config.alignment.steps else 0,
                module=JointObjective(
                    start.adapter, start.joint, config.objective, config.augmentation, opened.teacher, group.gather
                ),
                batch=source.joint,
                steps=task.steps,
                accumulate=config.loop.accumulate,
                images=config.loop.batch_size * config.loop.accumulate,
                optimizer=config.optimizer,
                steps_per_epoch=per_epoch,
                evaluate_every=0 if task.dev is None else every,
            ),
            state,
        )


@dataclass(frozen=True)
class Phase:
    """One phase of a training run.

    Attributes:
        name: name of the phase in the log.
        stage: number of the phase, counted from 0.
        module: module to train. Its ``forward`` maps a batch to losses by name.
        batch: makes a batch from the batch number, which counts from 0 in each phase.
        steps: number of optimiser steps.
        accumulate: number of batches per optimiser step.
        images: number of images per optimiser step, over all workers.
        optimizer: settings of the optimiser and of the learning rate.
        steps_per_epoch: number of optimiser steps per epoch, may be fractional.
        evaluate_every: number of steps between two evaluations; 0 never evaluates.
    """

    name: str
    stage: int
    module: nn.Module
    batch: Callable[[int], Any]
    steps: int
    accumulate: int
    images: int
    optimizer: OptimizerConfig
    steps_per_epoch: float
    evaluate_every: int = 0


@dataclass
class _Window:
    """Sums of losses and times since the last log record."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    steps: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, losses: dict[str, torch.Tensor]) -> None:
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value.detach()


class _Trainer:
    """Runs the phases of a training run on one worker. Arguments as in :func:`run_worker`."""

    def __init__(
        self,
        task: TrainTask,
        opened: OpenedTask,
        group: WorkerGroup,
        should_stop: Callable[[], bool],
        on_record: Callable[[Record], None],
    ) -> None:
        self.checkpoints = Checkpoints(task.config.run.folder, task.run)
        self._task = task
        self._opened = opened
        self._group = group
        self._should_stop = should_stop
        self._on_record = on_record
        self._skipped = (0, 0)
        self._dev: DevSet | None = None  # opened by only one worker, and only when the first evaluation is due

    def run(self, phase: Phase, state: TrainState | None) -> None:
        """Run the steps of `phase` that follow `state`, the last checkpoint."""
        resumed = state if state is not None and state.stage == phase.stage else None
        first, runtime, device = 0, self._task.config.run, self._opened.device
        if resumed is not None:
            phase.module.load_state_dict(resumed.weights)
            first = resumed.step
        if first == phase.steps:
            return
        module = phase.module.to(device).train()
        optimizer = make_optimizer(module, phase.optimizer)
        if resumed is not None:
            try:
                optimizer.load_state_dict(resumed.optimizer)
            except ValueError as error:
                raise ModelError(
                    f"the optimiser state in the checkpoint of step {first} does not fit the parameters ({error}); "
                    "resume with the version of edje-index that wrote the checkpoint, or use another run folder"
                ) from error
            self._skipped = resumed.skipped
        compiled: Any = torch.compile(module, dynamic=True) if runtime.compile else module
        wrapped = self._group.wrap(compiled, device)
        log = TrainLog(runtime.folder, phase.stage, first) if self._group.rank == 0 else None
        window = _Window()
        numbers = range(first * phase.accumulate, phase.steps * phase.accumulate)
        try:
            with contextlib.closing(made_ahead(phase.batch, numbers)) as batches:
                for step in range(first, phase.steps):
                    self._step(phase, wrapped, optimizer, batches, step, window)
                    done = step + 1
                    stop = self._group.any(self._should_stop(), device)
                    is_evaluated = phase.evaluate_every > 0 and done % phase.evaluate_every == 0
                    if is_evaluated:
                        self._evaluate(phase, log, done)
                    if done % runtime.log_every == 0 or done == phase.steps:
                        self._report(phase, log, done, window)
                        window = _Window()
                    keeps = is_evaluated and runtime.keep_best > 0
                    if stop or keeps or done % runtime.checkpoint_every == 0 or done == phase.steps:
                        self._save(phase, optimizer, done)
                    if stop and done < phase.steps:
                        raise TrainingStopped(
                            f"the training run stopped after step {done} of {phase.steps} of the {phase.name} phase"
                        )
        finally:
            if log is not None:
                log.close()

    def _step(
        self,
        phase: Phase,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Any],
        step: int,
        window: _Window,
    ) -> None:
        device, loop = self._opened.device, self._task.config.loop
        rate = learning_rate(step, phase.steps, phase.steps_per_epoch, phase.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        for part in range(phase.accumulate):
            waiting_since = time.monotonic()
            batch = next(batches).to(device)
            window.waited += time.monotonic() - waiting_since
            batch = self._opened.source.with_features(batch)
            number = step * phase.accumulate + part
            # Seeds dropout, so that a resumed training run draws the same random numbers.
            seed = stream(loop.seed, DROPOUT, phase.stage, number, self._group.rank).integers(2**63)
            torch.manual_seed(int(seed))
            is_last = part == phase.accumulate - 1
            with contextlib.ExitStack() as stack:
                if isinstance(module, DistributedDataParallel) and not is_last:
                    stack.enter_context(module.no_sync())  # the workers exchange gradients after the last part
                with autocast(resolve_dtype(loop.dtype, device), device):
                    losses = module(batch)
                (losses[TOTAL] / phase.accumulate).backward()
            window.add({name: value / phase.accumulate for name, value in losses.items()})
        parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
        if phase.optimizer.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, phase.optimizer.clip_norm, norm)
        is_bad = self._group.any(not bool(torch.isfinite(norm)), device)
        if not is_bad:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.add({"gradient": norm})
        window.steps += 1
        total, in_a_row = self._skipped
        self._skipped = (total + 1, in_a_row + 1) if is_bad else (total, 0)
        if self._skipped[1] >= loop.max_bad_steps:
            raise ModelError(
                f"{self._skipped[1]} steps in a row had no finite gradient, up to step {step + 1} of the "
                f"{phase.name} phase; train again in a new run folder with a lower optimizer.lr, a higher "
                "optimizer.warmup_steps, or loop.dtype float32"
            )

    def _save(self, phase: Phase, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self._group.rank == 0:
            runtime = self._task.config.run
            weights = {name: tensor.detach().cpu() for name, tensor in phase.module.state_dict().items()}
            kept = best_steps(read_log(runtime.folder), runtime.keep_best) if runtime.keep_best else set()
            self.checkpoints.save(
                TrainState(self._task.run, phase.stage, step, weights, optimizer.state_dict(), self._skipped), kept
            )
        self._group.barrier()

    def _evaluate(self, phase: Phase, log: TrainLog | None, step: int) -> None:
        """Measure and log recall on worker 0, with the logit alone as in the published code. Other workers wait."""
        if log is not None:
            bundle, source = self._opened.start, self._opened.source
            if self._dev is None:
                assert self._task.dev is not None
                self._dev = DevSet.open(*self._task.dev, source.features)
            modules: tuple[nn.Module, ...] = (bundle.adapter, bundle.joint)
            were_training = [module.training for module in modules]
            for module in modules:
                module.eval()
            recalls = dev_recalls(bundle, self._dev, source.features, self._task.config.fitting)
            for module, was_training in zip(modules, were_training, strict=True):
                module.train(was_training)
            recalls[RECALL] = sum(recalls.values()) / len(recalls)
            record = {"stage": phase.stage, "phase": DEV, "step": step, "steps": phase.steps, **recalls}
            log.write(record)
            self._on_record(record)
        self._group.barrier()

    def _report(self, phase: Phase, log: TrainLog | None, step: int, window: _Window) -> None:
        means = self._group.mean({name: total / window.steps for name, total in window.sums.items()})
        if log is None:
            return
        seconds = time.monotonic() - window.started
        record = {
            "stage": phase.stage,
            "phase": phase.name,
            "step": step,
            "steps": phase.steps,
            "lr": learning_rate(step - 1, phase.steps, phase.steps_per_epoch, phase.optimizer),
            **means,
            "images_per_second": window.steps * phase.images / seconds,
            "step_seconds": seconds / window.steps,
            "seconds": seconds,
            "data_wait": window.waited,
            "skipped": self._skipped[0],
            "unreadable": self._opened.source.features.unreadable(),
        }
        log.write(record)
        self._on_record(record)


def made_ahead(make: Callable[[int], _Item], numbers: range) -> Generator[_Item, None, None]:
    """Yield ``make(number)`` for each number in `numbers`. A thread makes up to two items ahead."""
    with ThreadPoolExecutor(1, "edje-batches") as pool:
        ready: deque[Future[_Item]] = deque(pool.submit(make, number) for number in numbers[:_AHEAD])
        try:
            for number in numbers:
                item = ready.popleft().result()
                if number + _AHEAD in numbers:
                    ready.append(pool.submit(make, number + _AHEAD))
                yield item
        finally:
            for future in ready:
                future.cancel()


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return an AdamW optimiser for the trainable parameters of `module`.

    Each parameter group has a ``factor``. The training loop multiplies the learning rate by this factor.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_decayed = parameter.ndim > 1 or config.decayed == "all"
            groups.setdefault((is_decayed, name.startswith("adapter.")), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay if is_decayed else 0.0,
                "factor": config.adapter_lr_factor if adapter else 1.0,
            }
            for (is_decayed, adapter), parameters in groups.items()
        ],
        lr=config.warmup_lr,
        betas=BETAS,
        fused=True,
    )


def total_steps(config: LoopConfig, pairs: int) -> int:
    """Return the number of optimiser steps of the joint phase.

    Args:
        config: settings of the training loop, with the number of steps or epochs.
        pairs: number of pairs per epoch.

    Raises:
        UsageError: `pairs` is less than `config.batch_size`.
    """
    if pairs < config.batch_size:
        raise UsageError(f"{pairs} {config.epoch_of} do not fill a batch of {config.batch_size}; lower loop.batch_size")
    return config.steps or max(1, math.ceil((config.epochs or 0) * steps_per_epoch(config, pairs)))


def steps_per_epoch(config: LoopConfig, pairs: int) -> float:
    """Return the number of optimiser steps per epoch of `pairs` pairs. The number may be fractional."""
    return (pairs // config.batch_size) / config.accumulate


def learning_rate(step: int, total_steps: int, steps_per_epoch: float, config: OptimizerConfig) -> float:
    """Return the learning rate of optimiser step `step`, counted from 0.

    During warm-up, the learning rate rises linearly from `config.warmup_lr` to `config.lr`. After warm-up,
    `config.decay` selects the learning rate:

    - "epoch": ``max(config.min_lr, config.lr * config.decay_rate ** finished_epochs)``.
    - "cosine": falls along a cosine to `config.min_lr` at the last step.
    """
    # As in the published code, warm-up with decay ``epoch`` ends with the first epoch.
    if step < config.warmup_steps and (config.decay == "cosine" or step < steps_per_epoch):
        return config.warmup_lr + (config.lr - config.warmup_lr) * step / config.warmup_steps
    floor = min(config.min_lr, config.lr)
    if config.decay == "epoch":
        return max(floor, config.lr * config.decay_rate ** int(step // steps_per_epoch))
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return floor + (config.lr - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
