"""The log of a training run: a record every few steps in ``log.jsonl`` and, if installed, in TensorBoard."""

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

    Opening the log removes records after `step` of `stage`, which a killed run may have left.

    Args:
        run_dir: run folder.
        stage, step: the phase and step after which training continues.
    """

    def __init__(self, run_dir: Path, stage: int, step: int) -> None:
        path = run_dir / LOG
        kept = [record for record in read_log(run_dir) if (record["stage"], record["step"]) <= (stage, step)]
        write_bytes_atomic(path, b"".join(_line(record) for record in kept))
        self._file = path.open("ab")
        self._tensorboard = _open_tensorboard(run_dir / "tensorboard")

    @property
    def has_tensorboard(self) -> bool:
        """True if TensorBoard is installed, so that records are also written for it."""
        return self._tensorboard is not None

    def write(self, record: Record) -> None:
        """Append a record, which must hold ``stage``, ``phase`` and ``step``."""
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
    """Return all records of a training run so far. Lines that are not valid JSON are skipped."""
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
