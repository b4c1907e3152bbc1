"""Writes and reads ``log.jsonl``, the log of a training run. TensorBoard gets the same records if it is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edje_index.filesystem import read_json_lines
from storage_formats.atomic import write_bytes_atomic

LOG = "log.jsonl"
Record = Mapping[str, Any]


class TrainLog:
    """Appends records to the log of a training run.

    Opening the log removes all records after `step` of `stage`. A killed run may have left such records.

    Args:
        run_dir: run folder.
        stage: number of the phase to continue, counted from 0.
        step: number of finished steps of this phase.
    """

    def __init__(self, run_dir: Path, stage: int, step: int) -> None:
        path = run_dir / LOG
        kept = [record for record in read_log(run_dir) if (record["stage"], record["step"]) <= (stage, step)]
        write_bytes_atomic(path, b"".join(_line(record) for record in kept))
        self._file = path.open("ab")
        self._tensorboard = _open_tensorboard(run_dir / "tensorboard")

    @property
    def has_tensorboard(self) -> bool:
        """True if TensorBoard is installed."""
        return self._tensorboard is not None

    def write(self, record: Record) -> None:
        """Append a record. The keys ``stage``, ``phase`` and ``step`` are required."""
        self._file.write(_line(record))
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._tensorboard.add_scalar(f"{record['phase']}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush all records to disk and close the log."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """Read the records of a training run. Lines that are not valid JSON are skipped."""
    path = run_dir / LOG
    if not path.exists():
        return []
    return [line.value for line in read_json_lines(path) if line.error is None]


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
