"""Manages the run folder of a training run."""

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
    """Write `record` to the run folder, or compare `record` with the stored record. Return the fingerprint of `record`.

    Raises:
        UsageError: the stored record differs, or the folder contains other files but no record.
        EdjeError: the stored record is damaged.
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
            raise ValueError(f"it must contain a JSON object, but contains a {type(record).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise EdjeError(f"cannot read {path}: {error}; restore the file, or set run.dir to another folder") from error
    return record


def _refuse_other_files(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()} - {"build"}  # holds the lock
    others = sorted(name for name in names if not name.startswith(f".{RUN_FILE}."))  # an unfinished write
    if others:
        raise UsageError(f"{folder} is not a run folder: it contains {others[0]}; set run.dir to another folder")


def _refuse_differences(folder: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    if recorded.get("format") != FORMAT:
        raise UsageError(
            f"the training run in {folder} was started by another version of edje-index, so it cannot be "
            "resumed; set run.dir to another folder"
        )
    lines = [
        f"{name} was {recorded.get(name)}, is {current.get(name)}"
        for name in sorted(recorded.keys() | current.keys())
        if recorded.get(name) != current.get(name)
    ]
    if lines:
        raise UsageError(
            f"the run in {folder} was begun with other settings; restore the earlier settings, or set run.dir to "
            "another folder:\n" + "\n".join(lines)
        )
