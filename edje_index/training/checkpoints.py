"""The checkpoints and the log of a training run.

A resumed training run gives the same weights as a run without interruption. Checkpoints
are written atomically: if writing fails, no incomplete checkpoint is left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from edje_index.errors import ModelError
from edje_index.inputs.json_lines import read_json_lines
from edje_index.models.weights import check_finite, read_checkpoint
from storage_formats.atomic import Json, fsync_path, replacing, write_bytes_atomic

# number of latest checkpoints that are kept
KEEP = 2
LOG = "log.jsonl"
DEV = "dev"


@dataclass
class TrainState:
    """The content of a checkpoint.

    Attributes:
        run: fingerprint of the settings, data and initial weights of the training run.
        stage: number of the phase, counted from 0.
        step: number of finished optimiser steps of this phase.
        epochs: number of finished epochs. It includes the epochs of earlier training
            runs that this run continues.
        weights: weights of the module that this phase trains, by name.
        optimizer: state of the optimiser.
        skipped: number of all optimiser steps of this phase that were skipped because
            their gradient was not finite, and number of consecutive skipped steps
            immediately before the checkpoint.
    """

    run: str
    stage: int
    step: int
    epochs: float
    weights: Json
    optimizer: Json
    skipped: tuple[int, int]


def save_checkpoint(run_dir: Path, state: TrainState) -> None:
    """Write `state` to the folder ``checkpoints`` of the run folder, and remove all
    checkpoints but the last two.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{state.stage:02d}-{state.step:09d}.pt") as file:
        torch.save(vars(state), file)
    fsync_path(folder)
    # temporary files of processes that were killed while writing a checkpoint
    unfinished = folder.glob(".*.pt.*")
    for unneeded in (*_paths(run_dir)[:-KEEP], *unfinished):
        unneeded.unlink(missing_ok=True)


def last_checkpoint(run_dir: Path, run: str) -> TrainState | None:
    """Read the last checkpoint in a run folder. Return None if there are no
    checkpoints.

    Args:
        run: fingerprint of the training run.

    Raises:
        ModelError: the checkpoint cannot be read, belongs to another training run, or
            contains weights that are not finite.
    """
    paths = _paths(run_dir)
    if not paths:
        return None
    path = paths[-1]
    try:
        state = TrainState(**read_checkpoint(path))
    except (ModelError, TypeError) as error:
        raise ModelError(
            f"cannot read the checkpoint {path}: {error}; remove this file to continue"
            " from the checkpoint before"
        ) from error
    if state.run != run:
        raise ModelError(
            f"the checkpoint {path} belongs to another training run; use another run"
            f" folder, or remove {path.parent} to start again from step 0"
        )
    check_finite(state.weights, f"the checkpoint {path}")
    return state


def _paths(run_dir: Path) -> list[Path]:
    """Return the paths of the checkpoints in a run folder, in order."""
    return sorted((run_dir / "checkpoints").glob("[0-9]*.pt"))


def begin_log(run_dir: Path, stage: int, step: int) -> None:
    """Remove the records of all steps after the step `step` of the phase `stage` from
    ``log.jsonl``. A run that is killed some steps after its last checkpoint leaves such
    records.

    `stage` is the number of the phase, counted from 0.
    """
    kept = [
        json.dumps(record) + "\n"
        for record in read_log(run_dir)
        if (record["stage"], record["step"]) <= (stage, step)
    ]
    write_bytes_atomic(run_dir / LOG, "".join(kept).encode())


def append_record(run_dir: Path, record: Json) -> None:
    """Append a record to ``log.jsonl``. The keys ``stage``, ``phase`` and ``step`` are
    required.
    """
    with (run_dir / LOG).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_log(run_dir: Path) -> list[Json]:
    """Read the records of a training run. Lines that are not valid JSON are skipped."""
    path = run_dir / LOG
    if not path.exists():
        return []
    return [value for _, value, error in read_json_lines(path) if not error]
