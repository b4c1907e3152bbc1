"""The checkpoints and the log of a training run.

A resumed training run gives the same weights as a run without interruption. Checkpoints
are written atomically: if writing fails, no incomplete checkpoint is left.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from edje_index.errors import ModelError
from edje_index.inputs.json_lines import read_json_lines
from edje_index.models.weights import check_finite, read_checkpoint
from storage_formats.atomic import Json, fsync_path, replacing, write_bytes_atomic

# number of latest checkpoints that are always kept
KEEP = 2
LOG = "log.jsonl"
DEV = "dev"
# Key, in a log record, of the mean of the R@1 of both directions on the dev captions.
# This mean decides which checkpoints count as the best.
RECALL = "recall"
# File name of a checkpoint. Its groups are the number of the phase and that of steps.
_NAME = re.compile(r"(\d{2})-(\d{9})\.pt")


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


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a training run, in the folder ``checkpoints`` of the run
    folder.

    Args:
        run: fingerprint of the training run. Checkpoints with another fingerprint are
            refused.
    """

    run_dir: Path
    run: str

    @property
    def _folder(self) -> Path:
        return self.run_dir / "checkpoints"

    def save(self, state: TrainState, keep_best: int) -> None:
        """Write `state` as a checkpoint, and remove old checkpoints.

        The last two checkpoints, and the `keep_best` checkpoints with the highest dev
        recall, are kept. If checkpoints have equal recalls, the later one counts as
        better.
        """
        evaluations = sorted(
            (record[RECALL], (record["stage"], record["step"]))
            for record in read_log(self.run_dir)
            if record["phase"] == DEV
        )
        best = [position for _, position in reversed(evaluations)][:keep_best]
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(state.stage, state.step)) as file:
            torch.save(vars(state), file)
        fsync_path(self._folder)
        # temporary files of processes that were killed while writing a checkpoint
        unfinished = self._folder.glob(".*.pt.*")
        old = [
            self._path(*position)
            for position in self._positions()[:-KEEP]
            if position not in best
        ]
        for unneeded in (*old, *unfinished):
            unneeded.unlink(missing_ok=True)

    def latest(self) -> TrainState | None:
        """Read the newest readable checkpoint. Return None if there are no
        checkpoints.

        Raises:
            ModelError: there are checkpoints, but none can be read; or the newest
                readable checkpoint belongs to another training run, or contains weights
                that are not finite.
        """
        problem: _UnreadableError | None = None
        for position in reversed(self._positions()):
            try:
                return self._read(self._path(*position))
            except _UnreadableError as error:
                problem = error
        if problem is None:
            return None
        raise problem

    def at(self, step: int) -> TrainState:
        """Read the checkpoint of `step` in the last phase that has checkpoints.

        Raises:
            ModelError: there is no such checkpoint; or the checkpoint cannot be read,
                belongs to another training run, or contains weights that are not
                finite.
        """
        positions = self._positions()
        last = max((stage for stage, _ in positions), default=0)
        steps = [kept for stage, kept in positions if stage == last]
        if step not in steps:
            raise ModelError(
                f"{self._folder} has no checkpoint of step {step}; choose one of the"
                f" steps {', '.join(map(str, steps))}"
            )
        return self._read(self._path(last, step))

    def _read(self, path: Path) -> TrainState:
        try:
            state = TrainState(**read_checkpoint(path))
        except (ModelError, TypeError) as error:
            raise _UnreadableError(
                f"cannot read the checkpoint {path}: {error}; remove {self._folder} to"
                " train again from step 0"
            ) from error
        if state.run != self.run:
            raise ModelError(
                f"the checkpoint {path} belongs to another training run; use another"
                f" run folder, or remove {self._folder} to start again from step 0"
            )
        check_finite(state.weights, f"the checkpoint {path}")
        return state

    def _path(self, stage: int, step: int) -> Path:
        return self._folder / f"{stage:02d}-{step:09d}.pt"

    def _positions(self) -> list[tuple[int, int]]:
        """Return (stage, step) of every checkpoint, in order."""
        matches = [
            match
            for path in self._folder.glob("*.pt")
            if (match := _NAME.fullmatch(path.name))
        ]
        return sorted((int(match[1]), int(match[2])) for match in matches)


class _UnreadableError(ModelError):
    """A checkpoint file cannot be read. Other checkpoints may still be readable."""


def begin_log(run_dir: Path, stage: int, step: int) -> None:
    """Remove the records of all steps after the step `step` of the phase `stage` from
    ``log.jsonl``. A run that is killed some steps after its last checkpoint leaves such
    records.

    `stage` is the number of the phase, counted from 0.
    """
    kept = [
        _line(record)
        for record in read_log(run_dir)
        if (record["stage"], record["step"]) <= (stage, step)
    ]
    write_bytes_atomic(run_dir / LOG, b"".join(kept))


def append_record(run_dir: Path, record: Json) -> None:
    """Append a record to ``log.jsonl``. The keys ``stage``, ``phase`` and ``step`` are
    required.
    """
    with (run_dir / LOG).open("ab") as file:
        file.write(_line(record))


def read_log(run_dir: Path) -> list[Json]:
    """Read the records of a training run. Lines that are not valid JSON are skipped."""
    path = run_dir / LOG
    if not path.exists():
        return []
    return [value for _, value, error in read_json_lines(path) if not error]


def _line(record: Json) -> bytes:
    return json.dumps(record).encode() + b"\n"
