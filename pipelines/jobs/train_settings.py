"""What decides a training, written down in its run folder: another run there must ask for the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.jobs.train_request import TrainRequest
from storage_formats.atomic import write_json_atomic
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig

RUN_FILE = "run.json"
# They decide what is made of the last checkpoint, not what is in it.
_NOT_COMPARED = frozenset(
    {"pooled_dim", "bank", "embedding_weight", "late_weight", "pooled_weight", "dev_captions", "dev_pool"}
)
_LANGUAGE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "vocab.txt")


def begin_run(request: TrainRequest, config: TrainConfig) -> str:
    """Fingerprint of the training; its first run writes its settings down, which later ones are held against.

    Raises:
        UsageError: the run folder belongs to a training with other settings (the message names them), or it holds
            something else.
    """
    settings = _settings(request, config)
    folder = request.run_folder
    path = folder / RUN_FILE
    if path.exists():
        _refuse_differences(folder, json.loads(path.read_text()), settings)
    else:
        names = {entry.name for entry in folder.iterdir()} - {"build"}  # that is the lock
        strangers = sorted(name for name in names if not name.startswith(f".{RUN_FILE}."))  # it was being written
        if strangers:
            raise UsageError(f"--run-dir {folder} is not empty and no training (it holds {strangers[0]}); give another")
        write_json_atomic(path, settings)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _refuse_differences(folder: Path, begun: dict[str, Any], asked: dict[str, Any]) -> None:
    lines = [
        f"{name} {begun.get(name)} there, {asked.get(name)} asked"
        for name in sorted(begun.keys() | asked.keys())
        if begun.get(name) != asked.get(name)
    ]
    if lines:
        raise UsageError(
            f"{folder} was begun with other settings: {'; '.join(lines)}. "
            "Repeat the settings that are there, or give another --run-dir"
        )


def _settings(request: TrainRequest, config: TrainConfig) -> dict[str, Any]:
    settings = {name: value for name, value in config.flat().items() if name not in _NOT_COMPARED}
    return settings | {
        "captions": [_digest(path) for path in request.captions],
        "images": None if request.images is None else str(request.images.absolute()),
        "split": request.split,
        "model": _bundle(request.model),
        "vision": request.vision,
        "language": _language(request.language),
        "features": _index(request.features),
        "init": _bundle(request.init),
        "teacher": _bundle(request.teacher),
        "teacher-features": _index(request.teacher_features),
        "miner": _bundle(request.miner),
        "miner-features": _index(request.miner_features),
        "dev": None if request.dev is None else _digest(request.dev),  # its images are among the features
        # Runs without these keep their fingerprints.
        **({"dev-split": request.dev_split} if request.dev_split else {}),
        **({"view-features": _index(request.view_features)} if request.view_features else {}),
    }


def _bundle(path: Path | None) -> str | None:
    from edje_index.bundles.info import read_bundle_info

    return None if path is None else read_bundle_info(path).fingerprint


def _index(path: Path | None) -> str | None:
    from storage_formats.format.manifest import Manifest

    return None if path is None else Manifest.load(path).plan


def _language(path: Path | None) -> str | None:
    from edje_index.bundles.info import INFO_FILE

    if path is None or (path / INFO_FILE).exists():
        return _bundle(path)
    files = [path / name for name in _LANGUAGE_FILES if (path / name).is_file()]
    if not files:
        raise UsageError(f"no language model in {path}: it holds neither config.json nor bundle.json")
    return hashlib.sha256("".join(map(_digest, files)).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
