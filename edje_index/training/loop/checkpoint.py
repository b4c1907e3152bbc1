"""Checkpoints: everything that a training needs to continue as if it had never stopped.

All random numbers follow from (seed, step), so weights, optimiser state and the step are sufficient. A file appears
under its name complete or not at all. The last two checkpoints are kept, and those that a run asks to keep.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import ModelError
from edje_index.models.weights import read_checkpoint
from storage_formats.atomic import fsync_path

KEEP = 2
_NAME = re.compile(r"(\d{2})-(\d{9})\.pt")


@dataclass
class TrainState:
    """How far a training has come.

    Attributes:
        run: fingerprint of everything that decides the training.
        stage: number of the phase, counted from 0.
        step: finished optimiser steps of that phase.
        weights: weights of the phase's module, which in the alignment phase is the adapter alone.
        optimizer: state of the optimiser.
        skipped: steps without a finite gradient, in total and in a row.
    """

    run: str
    stage: int
    step: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    skipped: tuple[int, int]


class _UnreadableError(Exception):
    """A checkpoint cannot be read; an earlier one may."""


class Checkpoints:
    """The checkpoints of a run, in the folder `checkpoints` of its run folder."""

    def __init__(self, run_dir: Path, run: str) -> None:
        self._folder = run_dir / "checkpoints"
        self._run = run

    def save(self, state: TrainState, kept: Callable[[int, int], bool] = lambda stage, step: False) -> Path:
        """Write a checkpoint and remove all but the last two and those whose stage and step are `kept`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(state.stage, state.step)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                torch.save({f.name: getattr(state, f.name) for f in fields(state)}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(self._folder)
        unfinished = self._folder.glob(".*.pt.*")  # left by processes that were killed while writing
        old = [path for path in self.paths()[:-KEEP] if not kept(*_position(path))]
        for unneeded in (*old, *unfinished):
            unneeded.unlink(missing_ok=True)
        return path

    def latest(self) -> TrainState | None:
        """The newest readable checkpoint; None if there are no checkpoints.

        Raises:
            ModelError: there are checkpoints, but none can be read, or they belong to another run.
        """
        problem: ModelError | None = None
        for path in reversed(self.paths()):
            try:
                return self._read(path)
            except _UnreadableError as error:
                problem = ModelError(f"cannot resume from {path}: {error}; remove {self._folder} to begin again")
        if problem is not None:
            raise problem
        return None

    def at(self, step: int) -> TrainState:
        """The checkpoint of `step` in the last phase that has checkpoints.

        Raises:
            ModelError: it was not kept, cannot be read, or belongs to another run.
        """
        positions = [_position(path) for path in self.paths()]
        last = max((stage for stage, _ in positions), default=0)
        steps = sorted(kept for stage, kept in positions if stage == last)
        if step not in steps:
            raise ModelError(f"{self._folder} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        path = self._path(last, step)
        try:
            return self._read(path)
        except _UnreadableError as error:
            raise ModelError(f"cannot read {path}: {error}; export another step") from error

    def _read(self, path: Path) -> TrainState:
        try:
            state = TrainState(**read_checkpoint(path))
        except (ModelError, TypeError) as error:
            raise _UnreadableError(str(error)) from error
        if state.run != self._run:
            raise ModelError(f"{path} belongs to another training; use another run folder, or remove {self._folder}")
        return state

    def _path(self, stage: int, step: int) -> Path:
        return self._folder / f"{stage:02d}-{step:09d}.pt"

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def _position(path: Path) -> tuple[int, int]:
    """Stage and step of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """All tensors of a module, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
