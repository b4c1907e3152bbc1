"""The training loop: phases of steps, from wherever the last checkpoint left off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edje_index.errors import ModelError
from edje_index.models.devices import autocast, resolve_device, resolve_dtype
from edje_index.training.config import OptimizerConfig, TrainConfig
from edje_index.training.data.prefetch import prefetched
from edje_index.training.data.sampling import DROPOUT, stream
from edje_index.training.loop.checkpoint import Checkpoints, TrainState, state_of
from edje_index.training.loop.distributed import WorkerGroup, postponed_exchange
from edje_index.training.loop.log import Journal
from edje_index.training.model.objectives import TOTAL
from storage_formats.errors import EdjeError

Record = dict[str, Any]
BETAS = (0.9, 0.999)


class TrainingStopped(EdjeError):
    """A stop was asked for; the last checkpoint holds all that was done."""


@dataclass(frozen=True)
class Runtime:
    """How a training runs, none of which is part of what is trained.

    Attributes:
        run_dir: holds checkpoints and the log.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of torch; None leaves them as they are.
        checkpoint_every, log_every: steps.
        compile: pass the phase's module through torch.compile.
    """

    run_dir: Path
    device: str = "auto"
    threads: int | None = None
    checkpoint_every: int = 200
    log_every: int = 10
    compile: bool = False


@dataclass(frozen=True)
class Phase:
    """One part of the training.

    Attributes:
        name: in the log.
        index: its place.
        module: gives the losses of a batch.
        batch: batch by its number, counted from 0 over the phase.
        steps, accumulate: optimiser steps, and batches of one.
        images: of a step, over all group.
        learning_rate: by step.
        optimizer: settings.
    """

    name: str
    index: int
    module: nn.Module
    batch: Callable[[int], Any]
    steps: int
    accumulate: int
    images: int
    learning_rate: Callable[[int], float]
    optimizer: OptimizerConfig


@dataclass
class _Window:
    """What has happened since the last line of the log."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    steps: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, losses: dict[str, torch.Tensor]) -> None:
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value.detach()


class Trainer:
    """Runs the phases of a training on one rank.

    Args:
        config: what to train.
        runtime: how.
        group: which part this process is.
        run: fingerprint of what decides the training.
        on_record: receives every line of the log, on rank 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        group: WorkerGroup,
        run: str,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._group = group
        self._run_name = run
        self._on_record = on_record
        self._device = resolve_device(runtime.device)
        self._checkpoints = Checkpoints(runtime.run_dir, run)
        self._skipped = (0, 0)
        if runtime.threads is not None:
            torch.set_num_threads(runtime.threads)

    @property
    def device(self) -> torch.device:
        """Where modules must be."""
        return self._device

    def run(self, phases: list[Callable[[], Phase]], should_stop: Callable[[], bool]) -> None:
        """Run every phase that is not finished; each is made when its turn comes, with what those before it trained.

        Raises:
            TrainingStopped: `should_stop()` turned true on some rank.
            ModelError: no finite gradient for too many steps in a row, or a checkpoint that does not fit.
        """
        state = self._checkpoints.latest()
        self._group.barrier()  # nobody writes while another still reads
        with torch.random.fork_rng():
            for index, make in enumerate(phases):
                phase = make()
                if state is not None and state.stage == index:
                    phase.module.load_state_dict(state.weights)
                elif state is not None and state.stage > index:
                    continue
                self._run_phase(phase, state if state is not None and state.stage == index else None, should_stop)

    def _run_phase(self, phase: Phase, state: TrainState | None, should_stop: Callable[[], bool]) -> None:
        begin = 0 if state is None else state.step
        if begin == phase.steps:
            return
        module = phase.module.to(self._device).train()
        optimizer = make_optimizer(module, phase.optimizer)
        if state is not None:
            _restore(optimizer, state)
            self._skipped = state.skipped
        compiled: Any = torch.compile(module, dynamic=True) if self._runtime.compile else module
        wrapped = self._group.wrap(compiled, self._device)
        journal = Journal(self._runtime.run_dir, phase.index, begin) if self._group.rank == 0 else None
        numbers = range(begin * phase.accumulate, phase.steps * phase.accumulate)
        window = _Window()
        try:
            with prefetched(phase.batch, numbers) as batches:
                for step in range(begin, phase.steps):
                    self._step(phase, wrapped, optimizer, batches, step, window)
                    done = step + 1
                    stop = self._group.any(should_stop(), self._device)
                    if done % self._runtime.log_every == 0 or done == phase.steps:
                        self._report(phase, journal, done, window)
                        window = _Window()
                    if stop or done % self._runtime.checkpoint_every == 0 or done == phase.steps:
                        self._save(phase, optimizer, done)
                    if stop and done < phase.steps:
                        raise TrainingStopped(f"stopped after step {done} of {phase.steps} ({phase.name})")
        finally:
            if journal is not None:
                journal.close()

    def _step(
        self,
        phase: Phase,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Any],
        step: int,
        window: _Window,
    ) -> None:
        rate, dtype = phase.learning_rate(step), resolve_dtype(self._config.loop.dtype, self._device)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        for part in range(phase.accumulate):
            began = time.monotonic()
            batch = next(batches).to(self._device)
            window.waited += time.monotonic() - began
            self._seed(phase.index, step * phase.accumulate + part)
            with postponed_exchange(module, part < phase.accumulate - 1):
                with autocast(dtype, self._device):
                    losses = module(batch)
                (losses[TOTAL] / phase.accumulate).backward()
            window.add({name: value / phase.accumulate for name, value in losses.items()})
        norm = nn.utils.clip_grad_norm_(module.parameters(), phase.optimizer.clip_norm)
        finite = self._group.any(not bool(torch.isfinite(norm)), self._device) is False
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.add({"gradient": norm})
        window.steps += 1
        self._count(finite, phase, step, optimizer)

    def _count(self, finite: bool, phase: Phase, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Keep account of skipped steps; ModelError where too many come in a row."""
        total, row = self._skipped
        self._skipped = (total, 0) if finite else (total + 1, row + 1)
        if self._skipped[1] >= self._config.loop.max_bad_steps:
            raise ModelError(
                f"no finite gradient in {self._skipped[1]} steps in a row, up to step {step + 1} ({phase.name}): "
                "lower --lr or --adapter-lr-factor, lengthen --warmup-steps, or use --dtype float32, in a new --run-dir"
            )

    def _save(self, phase: Phase, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self._group.rank == 0:
            self._checkpoints.save(
                TrainState(
                    run=self._run_name,
                    stage=phase.index,
                    step=step,
                    weights=state_of(phase.module),
                    optimizer=optimizer.state_dict(),
                    skipped=self._skipped,
                )
            )
        self._group.barrier()

    def _report(self, phase: Phase, journal: Journal | None, step: int, window: _Window) -> None:
        means = self._group.mean({name: total / window.steps for name, total in window.sums.items()})
        if journal is None:
            return
        seconds = time.monotonic() - window.started
        record = {
            "stage": phase.index,
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
        }
        journal.write(record)
        self._on_record({**record, "tensorboard": journal.has_board})

    def _seed(self, stage: int, number: int) -> None:
        """Dropout's random numbers, from the place in the training alone."""
        rng = stream(self._config.loop.seed, DROPOUT, stage, number, self._group.rank)
        torch.manual_seed(int(rng.integers(2**63)))


def _restore(optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    """ModelError where the state is of other parameters: an earlier version trained what this one leaves alone."""
    try:
        optimizer.load_state_dict(state.optimizer)
    except ValueError as error:
        raise ModelError(
            f"the checkpoint of step {state.step} trains other parameters ({error}); go on with the version that "
            "began it, or begin anew with another --run-dir"
        ) from error


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over what is to be trained. Biases, norms and other vectors have no weight decay.

    Each group's ``factor`` times the schedule's learning rate is its own.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim > 1, name.startswith("adapter.")), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay if matrix else 0.0,
                "factor": config.adapter_lr_factor if adapter else 1.0,
            }
            for (matrix, adapter), parameters in groups.items()
        ],
        lr=config.warmup_lr,
        betas=BETAS,
        fused=True,
    )
