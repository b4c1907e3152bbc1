"""Saves and reads the checkpoints of a training run.

A resumed training run gives the same weights as a run without interruption. If writing a checkpoint fails, the file
does not exist.
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
from edje_index.models.weights import check_finite, read_checkpoint
from storage_formats.atomic import fsync_path

KEEP = 2
_NAME = re.compile(r"(\d{2})-(\d{9})\.pt")


@dataclass
class TrainState:
    """The content of a checkpoint.

    Attributes:
        run: fingerprint of the settings, data and initial weights of the training run.
        stage: number of the phase, counted from 0.
        step: number of finished optimiser steps of this phase.
        weights: weights of the module that this phase trains, by name.
        optimizer: state of the optimiser.
        skipped: number of steps without a finite gradient in the whole training run, and number of such steps in a row
            immediately before the checkpoint.
    """

    run: str
    stage: int
    step: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    skipped: tuple[int, int]


class _UnreadableError(Exception):
    """A checkpoint cannot be read. Other checkpoints may be readable."""


class Checkpoints:
    """The checkpoints of a training run, in the folder ``checkpoints`` of the run folder.

    Args:
        run_dir: run folder.
        run: fingerprint of the training run. Checkpoints with another fingerprint are refused.
    """

    def __init__(self, run_dir: Path, run: str) -> None:
        self._folder = run_dir / "checkpoints"
        self._run = run

    def save(self, state: TrainState, kept: Callable[[int, int], bool] = lambda stage, step: False) -> Path:
        """Write `state` as a checkpoint, remove old checkpoints, and return the path of the new file.

        The last two checkpoints are not removed. Checkpoints for which ``kept(stage, step)`` is True are not removed.
        """
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
        unfinished = self._folder.glob(".*.pt.*")  # files of processes that were killed while writing a checkpoint
        old = [path for path in self.paths()[:-KEEP] if not kept(*_position(path))]
        for unneeded in (*old, *unfinished):
            unneeded.unlink(missing_ok=True)
        return path

    def latest(self) -> TrainState | None:
        """Read the newest readable checkpoint. Return None if there are no checkpoints.

        Raises:
            ModelError: checkpoints exist but none can be read, or the newest readable checkpoint belongs to another
                training run or has weights that are NaN or infinite.
        """
        problem: ModelError | None = None
        for path in reversed(self.paths()):
            try:
                return self._read(path)
            except _UnreadableError as error:
                problem = ModelError(
                    f"cannot read the checkpoint {path}: {error}; remove {self._folder} to train again from step 0"
                )
        if problem is not None:
            raise problem
        return None

    def at(self, step: int) -> TrainState:
        """Read the checkpoint of `step`, in the last phase that has checkpoints.

        Raises:
            ModelError: the checkpoint does not exist, cannot be read, belongs to another training run, or has weights
                that are NaN or infinite.
        """
        positions = [_position(path) for path in self.paths()]
        last = max((stage for stage, _ in positions), default=0)
        steps = sorted(kept for stage, kept in positions if stage == last)
        if step not in steps:
            raise ModelError(
                f"{self._folder} has no checkpoint of step {step}; choose one of the steps {', '.join(map(str, steps))}"
            )
        path = self._path(last, step)
        try:
            return self._read(path)
        except _UnreadableError as error:
            raise ModelError(f"cannot read the checkpoint {path}: {error}; choose another step") from error

    def _read(self, path: Path) -> TrainState:
        try:
            state = TrainState(**read_checkpoint(path))
        except (ModelError, TypeError) as error:
            raise _UnreadableError(str(error)) from error
        if state.run != self._run:
            raise ModelError(
                f"the checkpoint {path} belongs to another training run; use another run folder, or remove "
                f"{self._folder} to start again from step 0"
            )
        check_finite(state.weights, f"the checkpoint {path}")
        return state

    def _path(self, stage: int, step: int) -> Path:
        return self._folder / f"{stage:02d}-{step:09d}.pt"

    def paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def _position(path: Path) -> tuple[int, int]:
    """Read the stage and the step from the file name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Copy all tensors of `module` to the CPU, and return the copies by name."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
