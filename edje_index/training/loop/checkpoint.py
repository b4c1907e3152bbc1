"""Checkpoints: all that a training needs to go on as if it had not been stopped.

Everything random follows from (seed, step), so that weights, optimiser and the step are all of it. A file appears under
its name whole or not at all; the last two are kept.
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
    """Where a training stands.

    Attributes:
        run: fingerprint of what decides the training.
        stage: index of the phase.
        step: optimiser steps of that phase that are done.
        weights: of the phase's module; the adapter alone while it is aligned.
        optimizer: its state.
        skipped: steps without a finite gradient, so far and in a row.
    """

    run: str
    stage: int
    step: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    skipped: tuple[int, int]


class Checkpoints:
    """The checkpoints of a run, in its folder `checkpoints`."""

    def __init__(self, run_dir: Path, run: str) -> None:
        self._folder = run_dir / "checkpoints"
        self._run = run

    def save(self, state: TrainState) -> Path:
        """Write a checkpoint and remove those before the last two."""
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
        killed = self._folder.glob(".*.pt.*")  # processes that were killed while they wrote left these
        for old in (*self.paths()[:-KEEP], *killed):
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> TrainState | None:
        """The newest checkpoint that can be read; None where there is none.

        Raises:
            ModelError: there are checkpoints, and none can be read, or they are of another run.
        """
        paths = self.paths()
        problem: ModelError | None = None
        for path in reversed(paths):
            try:
                state = TrainState(**read_checkpoint(path))
            except (ModelError, TypeError) as error:
                problem = ModelError(f"cannot go on from {path}: {error}; remove {self._folder} to begin anew")
                continue
            if state.run != self._run:
                raise ModelError(f"{path} is of another training: give another --run-dir, or remove {self._folder}")
            return state
        if problem is not None:
            raise problem
        return None

    def paths(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Every tensor of a module, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
