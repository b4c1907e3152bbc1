"""The training loop: runs the optimiser steps of each phase, from the last checkpoint on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from edje_index.errors import ModelError
from edje_index.models.devices import autocast, resolve_dtype
from edje_index.training.config import OptimizerConfig
from edje_index.training.data.prefetch import prefetched
from edje_index.training.data.sampling import DROPOUT, stream
from edje_index.training.loop.checkpoint import Checkpoints, TrainState, state_of
from edje_index.training.loop.dev_recall import Evaluation, best_steps, dev_record
from edje_index.training.loop.distributed import WorkerGroup, postponed_exchange
from edje_index.training.loop.log import TrainLog, read_log
from edje_index.training.loop.task import TrainTask
from edje_index.training.model.objectives import TOTAL
from storage_formats.errors import EdjeError

Record = dict[str, Any]
BETAS = (0.9, 0.999)


class TrainingStopped(EdjeError):
    """The training run was stopped on request. A checkpoint was saved first."""


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
        learning_rate: returns the learning rate of a step, which counts from 0 in each phase.
        optimizer: settings of the optimiser.
        evaluation: how the phase is evaluated; None without evaluation.
        complete: computes the patch features of a batch on the device, and returns the completed batch. It is called
            before the forward pass.
        unreadable: returns the number of images that the workers could not read so far. Called on worker 0.
    """

    name: str
    stage: int
    module: nn.Module
    batch: Callable[[int], Any]
    steps: int
    accumulate: int
    images: int
    learning_rate: Callable[[int], float]
    optimizer: OptimizerConfig
    evaluation: Evaluation | None = None
    complete: Callable[[Any], Any] = lambda batch: batch
    unreadable: Callable[[], int] = lambda: 0


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


class Trainer:
    """Runs the phases of a training run on one worker.

    Args:
        task: provides the settings, the runtime and the fingerprint.
        group: rank of this worker, and number of workers.
        device: device to train on.
        on_record: called with every log record, only on worker 0.
    """

    def __init__(
        self,
        task: TrainTask,
        group: WorkerGroup,
        device: torch.device,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._loop = task.config.loop
        self._runtime = task.runtime
        self._group = group
        self._run = task.run
        self._on_record = on_record
        self._device = device
        self._checkpoints = Checkpoints(task.runtime.run_dir, task.run)
        self._skipped = (0, 0)

    def run(self, phases: Sequence[Callable[[], Phase]], should_stop: Callable[[], bool]) -> None:
        """Run the phases in order, from the last checkpoint on.

        Args:
            phases: functions that make the phases. Each function is called after the earlier phases have finished.
            should_stop: called after every step. If the result is True, the run saves a checkpoint and stops.

        Raises:
            TrainingStopped: `should_stop` returned True on at least one worker.
            ModelError: ``loop.max_bad_steps`` steps in a row had no finite gradient, or the checkpoints cannot be used.
        """
        state = self._checkpoints.latest()
        self._group.barrier()  # no worker writes a checkpoint while another worker still reads one
        with torch.random.fork_rng():
            for make in phases:
                phase = make()
                if state is not None and state.stage > phase.stage:
                    continue
                resumed = state if state is not None and state.stage == phase.stage else None
                if resumed is not None:
                    phase.module.load_state_dict(resumed.weights)
                self._run_phase(phase, resumed, should_stop)

    def _run_phase(self, phase: Phase, state: TrainState | None, should_stop: Callable[[], bool]) -> None:
        first = 0 if state is None else state.step
        if first == phase.steps:
            return
        module = phase.module.to(self._device).train()
        optimizer = make_optimizer(module, phase.optimizer)
        if state is not None:
            _restore(optimizer, state)
            self._skipped = state.skipped
        compiled: Any = torch.compile(module, dynamic=True) if self._runtime.compile else module
        wrapped = self._group.wrap(compiled, self._device)
        log = TrainLog(self._runtime.run_dir, phase.stage, first) if self._group.rank == 0 else None
        window = _Window()
        try:
            with prefetched(phase.batch, range(first * phase.accumulate, phase.steps * phase.accumulate)) as batches:
                for step in range(first, phase.steps):
                    self._step(phase, wrapped, optimizer, batches, step, window)
                    done = step + 1
                    stop = self._group.any(should_stop(), self._device)
                    is_evaluated = phase.evaluation is not None and phase.evaluation.is_due(done)
                    if is_evaluated:
                        self._evaluate(phase, log, done)
                    if done % self._runtime.log_every == 0 or done == phase.steps:
                        self._report(phase, log, done, window)
                        window = _Window()
                    keeps = is_evaluated and (self._runtime.keep_all or self._runtime.keep_best > 0)
                    if stop or keeps or done % self._runtime.checkpoint_every == 0 or done == phase.steps:
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
        rate, dtype = phase.learning_rate(step), resolve_dtype(self._loop.dtype, self._device)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate * parameters["factor"]
        for part in range(phase.accumulate):
            waiting_since = time.monotonic()
            batch = next(batches).to(self._device)
            window.waited += time.monotonic() - waiting_since
            batch = phase.complete(batch)
            self._seed(phase.stage, step * phase.accumulate + part)
            with postponed_exchange(module, part < phase.accumulate - 1):
                with autocast(dtype, self._device):
                    losses = module(batch)
                (losses[TOTAL] / phase.accumulate).backward()
            window.add({name: value / phase.accumulate for name, value in losses.items()})
        norm = _limited_norm(module, phase.optimizer.clip_norm)
        finite = self._group.any(not bool(torch.isfinite(norm)), self._device) is False
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.add({"gradient": norm})
        window.steps += 1
        self._count_skipped(finite, phase, step)

    def _count_skipped(self, finite: bool, phase: Phase, step: int) -> None:
        """Count steps without a finite gradient. Raise ModelError after `max_bad_steps` such steps in a row."""
        total, consecutive = self._skipped
        self._skipped = (total, 0) if finite else (total + 1, consecutive + 1)
        if self._skipped[1] >= self._loop.max_bad_steps:
            raise ModelError(
                f"{self._skipped[1]} steps in a row had no finite gradient, up to step {step + 1} of the "
                f"{phase.name} phase; train again in a new run folder with a lower optimizer.lr, a higher "
                "optimizer.warmup_steps, or loop.dtype float32"
            )

    def _save(self, phase: Phase, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self._group.rank == 0:
            self._checkpoints.save(
                TrainState(
                    run=self._run,
                    stage=phase.stage,
                    step=step,
                    weights=state_of(phase.module),
                    optimizer=optimizer.state_dict(),
                    skipped=self._skipped,
                ),
                self._is_kept(),
            )
        self._group.barrier()

    def _is_kept(self) -> Callable[[int, int], bool]:
        """Return a function that maps (stage, step) to True if the checkpoint must be kept."""
        if self._runtime.keep_all:
            return lambda stage, step: True
        best = best_steps(read_log(self._runtime.run_dir), self._runtime.keep_best)
        return lambda stage, step: (stage, step) in best

    def _evaluate(self, phase: Phase, log: TrainLog | None, step: int) -> None:
        """Measure and log recall on worker 0. The other workers wait."""
        if phase.evaluation is not None and log is not None:
            record = dev_record(phase.stage, step, phase.steps, phase.evaluation.recalls())
            log.write(record)
            self._on_record({**record, "tensorboard": log.has_tensorboard})
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
            "lr": phase.learning_rate(step - 1),
            **means,
            "images_per_second": window.steps * phase.images / seconds,
            "step_seconds": seconds / window.steps,
            "seconds": seconds,
            "data_wait": window.waited,
            "skipped": self._skipped[0],
            "unreadable": phase.unreadable(),
        }
        log.write(record)
        self._on_record({**record, "tensorboard": log.has_tensorboard})

    def _seed(self, stage: int, number: int) -> None:
        """Set the seed of dropout, so that a resumed training run draws the same random numbers."""
        rng = stream(self._loop.seed, DROPOUT, stage, number, self._group.rank)
        torch.manual_seed(int(rng.integers(2**63)))


def _restore(optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    """Load the optimiser state. Raise ModelError if the state does not fit the parameters."""
    try:
        optimizer.load_state_dict(state.optimizer)
    except ValueError as error:
        raise ModelError(
            f"the optimiser state in the checkpoint of step {state.step} does not fit the parameters "
            f"({error}); resume with the version of edje-index that wrote the checkpoint, or use another "
            "run folder"
        ) from error


def _limited_norm(module: nn.Module, limit: float) -> torch.Tensor:
    """Return the norm of the gradient. Unless `limit` is 0, scale a gradient of larger norm down to `limit`."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
    if limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


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
