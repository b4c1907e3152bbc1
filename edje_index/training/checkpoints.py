"""The checkpoint and the log of a training run.

A resumed training run gives the same weights as a run without interruption. A new
checkpoint replaces the one before atomically: after a crash, one of the two is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from edje_index.errors import ModelError
from edje_index.inputs.json_lines import read_json_lines
from edje_index.models.weights import read_checkpoint
from storage_formats.atomic import Json, fsync_path, replacing, write_bytes_atomic

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


@dataclass
class TrainState:
    """The content of a checkpoint.

    Attributes:
        run: fingerprint of the settings, data and initial weights of the training run.
        phase: name of the phase.
        step: number of finished optimiser steps of this phase.
        epochs: number of finished epochs. It includes the epochs of earlier training
            runs that this run continues.
        weights: weights of the module that this phase trains, by name.
        optimizer: state of the optimiser.
    """

    run: str
    phase: str
    step: int
    epochs: int
    weights: Json
    optimizer: Json


def save_checkpoint(run_dir: Path, state: TrainState) -> None:
    """Write `state` to the run folder."""
    # files of processes that were killed while they wrote a checkpoint
    for unfinished in run_dir.glob(f".{CHECKPOINT}.*"):
        unfinished.unlink()
    with replacing(run_dir / CHECKPOINT) as file:
        try:
            torch.save(vars(state), file)
        except RuntimeError as error:
            # After an error of `file.write`, torch raises another one at the end.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    fsync_path(run_dir)


def last_checkpoint(run_dir: Path, run: str) -> TrainState | None:
    """Read the checkpoint in a run folder. Return None if there is none.

    Args:
        run: fingerprint of the training run.

    Raises:
        ModelError: the checkpoint cannot be read, or belongs to another training run.
    """
    path = run_dir / CHECKPOINT
    if not path.exists():
        return None
    advice = "use another run folder, or remove this file to start again from step 0"
    try:
        state = TrainState(**read_checkpoint(path))
    except (ModelError, TypeError) as error:
        raise ModelError(
            f"cannot read the checkpoint {path}: {error}; {advice}"
        ) from error
    if state.run != run:
        raise ModelError(
            f"the checkpoint {path} belongs to another training run; {advice}"
        )
    return state


def begin_log(run_dir: Path, phase: str, step: int) -> None:
    """Remove the records of all steps after the step `step` of `phase` from
    ``log.jsonl``. A run that is killed some steps after its last checkpoint leaves such
    records.
    """
    kept = [
        json.dumps(record) + "\n"
        for record in read_log(run_dir)
        if record["phase"] != phase or record["step"] <= step
    ]
    write_bytes_atomic(run_dir / LOG, "".join(kept).encode())


def append_record(run_dir: Path, record: Json) -> None:
    """Append a record, which has the keys ``phase`` and ``step``, to ``log.jsonl``."""
    with (run_dir / LOG).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_log(run_dir: Path) -> list[Json]:
    """Read the records of a training run. Lines that are not valid JSON are skipped."""
    path = run_dir / LOG
    if not path.exists():
        return []
    return [value for _, value, error in read_json_lines(path) if not error]
