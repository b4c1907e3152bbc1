"""The log of a run: `log.jsonl`, one record every few steps, and the same for TensorBoard if it is installed."""

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
    """Appends to the log of a run, from a given step on.

    Records of later steps are removed. A run that was killed before its next checkpoint leaves such records.
    """

    def __init__(self, run_dir: Path, stage: int, step: int) -> None:
        path = run_dir / LOG
        kept = [record for record in read_log(run_dir) if (record["stage"], record["step"]) <= (stage, step)]
        write_bytes_atomic(path, b"".join(_line(record) for record in kept))
        self._file = path.open("ab")
        self._tensorboard = _open_tensorboard(run_dir / "tensorboard")

    @property
    def has_tensorboard(self) -> bool:
        """Whether TensorBoard is installed."""
        return self._tensorboard is not None

    def write(self, record: Record) -> None:
        """Append a record; its `stage` and `step` say where it belongs."""
        self._file.write(_line(record))
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._tensorboard.add_scalar(f"{record['phase']}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush the records to disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run so far, without an incomplete last line."""
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
