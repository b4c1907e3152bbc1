"""Checkpoints: everything that a training needs to continue as if it had never stopped.

All random numbers follow from (seed, step), so weights, optimiser state and the step are sufficient. A file appears
under its name complete or not at all. The last two are kept.
"""

from __future__ import annotations

import os
import re
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
        weights: of the phase's module. The alignment phase has the adapter alone.
        optimizer: state of the optimiser.
        skipped: steps without a finite gradient, in total and in a row.
    """

    run: str
    stage: int
    step: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    skipped: tuple[int, int]


class Checkpoints:
    """The checkpoints of a run, in the folder `checkpoints` of its run folder."""

    def __init__(self, run_dir: Path, run: str) -> None:
        self._folder = run_dir / "checkpoints"
        self._run = run

    def save(self, state: TrainState) -> Path:
        """Write a checkpoint and remove all but the last two."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{state.stage:02d}-{state.step:09d}.pt"
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
        for old in (*self.paths()[:-KEEP], *unfinished):
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> TrainState | None:
        """The newest readable checkpoint; None if there are no checkpoints.

        Raises:
            ModelError: there are checkpoints, but none can be read, or they belong to another run.
        """
        problem: ModelError | None = None
        for path in reversed(self.paths()):
            try:
                state = TrainState(**read_checkpoint(path))
            except (ModelError, TypeError) as error:
                problem = ModelError(f"cannot resume from {path}: {error}; remove {self._folder} to begin again")
                continue
            if state.run != self._run:
                raise ModelError(
                    f"{path} belongs to another training; use another run folder, or remove {self._folder}"
                )
            return state
        if problem is not None:
            raise problem
        return None

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """All tensors of a module, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
