"""The record of a run folder: everything that decides the training. A resumed run must have the same record."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_formats.atomic import write_json_atomic
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig
    from pipelines.jobs.training.request import TrainingInputs

RUN_FILE = "run.json"
_FORMAT = 2
_LANGUAGE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "vocab.txt")


def begin_run(folder: Path, inputs: TrainingInputs, config: TrainConfig) -> str:
    """Fingerprint of the training in `folder`. The first run writes the record, later ones are checked against it.

    Raises:
        UsageError: the run folder belongs to a training with other settings (the message names them), or it holds
            something else.
    """
    record = _record(inputs, config)
    path = folder / RUN_FILE
    if path.exists():
        _refuse_differences(folder, json.loads(path.read_text()), record)
    else:
        names = {entry.name for entry in folder.iterdir()} - {"build"}  # holds the lock
        others = sorted(name for name in names if not name.startswith(f".{RUN_FILE}."))  # an unfinished write
        if others:
            raise UsageError(
                f"{folder} is not empty and holds no training (it holds {others[0]}); set run.dir to another folder"
            )
        write_json_atomic(path, record)
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _refuse_differences(folder: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    if recorded.get("format") != _FORMAT:
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


def _record(inputs: TrainingInputs, config: TrainConfig) -> dict[str, Any]:
    """The settings that decide the last checkpoint. `fitting` decides only what is made of it afterwards."""
    groups = config.model_dump(exclude={"fitting"})
    settings = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    inputs_record = {
        "captions": [_file_digest(path) for path in inputs.captions],
        "images": None if inputs.images is None else str(inputs.images.absolute()),
        "split": inputs.split,
        "dev": None if inputs.dev is None else _file_digest(inputs.dev),  # its images are among the features
        "dev_split": inputs.dev_split,
        "model": _bundle_digest(inputs.model),
        "vision": inputs.vision,
        "language": _language_digest(inputs.language),
        "init": _bundle_digest(inputs.init),
        "features": _index_digest(inputs.features),
        "view_features": _index_digest(inputs.view_features),
        "teacher": _bundle_digest(inputs.teacher),
        "teacher_features": _index_digest(inputs.teacher_features),
        "miner": _bundle_digest(inputs.miner),
        "miner_features": _index_digest(inputs.miner_features),
    }
    return {"format": _FORMAT, **settings, **{f"inputs.{key}": value for key, value in inputs_record.items()}}


def _bundle_digest(path: Path | None) -> str | None:
    from edje_index.bundles.info import read_bundle_info

    return None if path is None else read_bundle_info(path).fingerprint


def _index_digest(path: Path | None) -> str | None:
    from storage_formats.format.manifest import Manifest

    return None if path is None else Manifest.load(path).plan


def _language_digest(path: Path | None) -> str | None:
    from edje_index.bundles.info import INFO_FILE

    if path is None or (path / INFO_FILE).exists():
        return _bundle_digest(path)
    files = [path / name for name in _LANGUAGE_FILES if (path / name).is_file()]
    if not files:
        raise UsageError(f"no language model in {path}: it holds neither config.json nor bundle.json")
    return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
