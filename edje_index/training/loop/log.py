"""The record of a run: `log.jsonl`, a line every few steps, and the same for TensorBoard where that is installed."""

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


class Journal:
    """Writes the record of a run, from a given place on.

    Lines of steps beyond it, which a run wrote that was killed before its next checkpoint, are taken out.
    """

    def __init__(self, run_dir: Path, stage: int, step: int) -> None:
        path = run_dir / LOG
        kept = [record for record in read_log(run_dir) if (record["stage"], record["step"]) <= (stage, step)]
        write_bytes_atomic(path, b"".join(_line(record) for record in kept))
        self._file = path.open("ab")
        self._board = _open_board(run_dir / "tensorboard")

    @property
    def has_board(self) -> bool:
        """Whether TensorBoard is installed."""
        return self._board is not None

    def write(self, record: Record) -> None:
        """Add a line; `stage` and `step` say where it belongs."""
        self._file.write(_line(record))
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{record['phase']}/{name}", value, record["step"])

    def close(self) -> None:
        """Put the lines on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run so far; a last line that is not whole is left out."""
    path = run_dir / LOG
    if not path.exists():
        return []
    return [line.value for line in read_json_lines(path) if line.error is None]


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
