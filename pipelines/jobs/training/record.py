"""Makes the record of a training run: everything that determines the trained weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig
    from pipelines.jobs.training.read_inputs import ReadInputs
    from pipelines.jobs.training.request import TrainingInputs

FORMAT = 3
_LANGUAGE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "vocab.txt")


def training_record(inputs: TrainingInputs, given: ReadInputs, config: TrainConfig) -> dict[str, Any]:
    """Return a JSON object with all settings except the group `fitting`, and the digests of all input files."""
    # The settings in `fitting` are applied to the last checkpoint and do not change the trained weights.
    groups = config.model_dump(exclude={"fitting"})
    settings = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    inputs_record = {
        "captions": [_file_digest(path) for path in inputs.captions],
        "images": None if inputs.images is None else str(inputs.images.absolute()),
        "split": inputs.split,
        "truncated": inputs.truncated,
        "dev": None if inputs.dev is None else _file_digest(inputs.dev),  # the features include the dev images
        "dev_split": inputs.dev_split,
        "model": _bundle_digest(inputs.model),
        "vision": inputs.vision,
        "language": _language_digest(inputs.language),
        "init": _bundle_digest(inputs.init),
        "teacher": _bundle_digest(inputs.teacher),
        "miner": _bundle_digest(inputs.miner),
        "features": inputs.features if given.features is None else given.features.manifest.plan,
        "view_features": None if given.view_features is None else given.view_features.manifest.plan,
        "teacher_features": None if given.teacher_features is None else given.teacher_features.manifest.plan,
        "miner_features": None if given.miner_features is None else given.miner_features.manifest.plan,
    }
    stored = (inputs.feature_precision,) if given.features is None else given.features.manifest.spec.precisions
    if "bf16" not in stored:  # else the features are read in bf16, and records of earlier versions have no precision
        inputs_record["feature_precision"] = stored[0]
    return {"format": FORMAT, **settings, **{f"inputs.{key}": value for key, value in inputs_record.items()}}


def _bundle_digest(path: Path | None) -> str | None:
    from edje_index.bundles.info import read_bundle_info

    return None if path is None else read_bundle_info(path).fingerprint


def _language_digest(path: Path | None) -> str | None:
    from edje_index.bundles.info import INFO_FILE

    if path is None or (path / INFO_FILE).exists():
        return _bundle_digest(path)
    files = [path / name for name in _LANGUAGE_FILES if (path / name).is_file()]
    if not files:
        raise UsageError(
            f"{path} is not a language model, because it contains neither config.json nor bundle.json; "
            "choose another directory"
        )
    return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check the path and the permissions") from error
