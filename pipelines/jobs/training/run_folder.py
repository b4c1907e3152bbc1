"""The run folder of a training. Only runs with the same record resume it; all others are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipelines.jobs.training.record import FORMAT
from storage_formats.atomic import write_json_atomic
from storage_formats.errors import EdjeError, UsageError

RUN_FILE = "run.json"


def begin_run(folder: Path, record: dict[str, Any]) -> str:
    """Fingerprint of the training in `folder`. The first run writes its record, later ones are checked against it.

    Raises:
        UsageError: the folder belongs to a training with another record (the message names the differences), or it
            holds something else.
        EdjeError: the record is damaged.
    """
    path = folder / RUN_FILE
    if path.exists():
        _refuse_differences(folder, _read_record(path), record)
    else:
        _refuse_other_files(folder)
        write_json_atomic(path, record)
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict):
            raise ValueError(f"it holds {type(record).__name__} instead of an object")
    except (OSError, ValueError, RecursionError) as error:
        raise EdjeError(f"cannot read {path}: {error}; restore the file, or set run.dir to another folder") from error
    return record


def _refuse_other_files(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()} - {"build"}  # holds the lock
    others = sorted(name for name in names if not name.startswith(f".{RUN_FILE}."))  # an unfinished write
    if others:
        raise UsageError(
            f"{folder} is not empty and holds no training (it holds {others[0]}); set run.dir to another folder"
        )


def _refuse_differences(folder: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    if recorded.get("format") != FORMAT:
        raise UsageError(
            f"{folder} was begun by another version of this program, whose runs cannot be resumed; set run.dir to "
            "another folder"
        )
    lines = [
        f"{name} was {recorded.get(name)}, is {current.get(name)}"
        for name in sorted(recorded.keys() | current.keys())
        if recorded.get(name) != current.get(name)
    ]
    if lines:
        raise UsageError(
            f"{folder} was begun with other settings; restore them or set run.dir to another folder:\n"
            + "\n".join(lines)
        )
