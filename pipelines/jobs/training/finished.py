"""Finds the result of a training run that was finished before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from pipelines.jobs.train_finish import RESULT
from pipelines.jobs.training.result import TrainResult
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from edje_index.training.config import FittingConfig
    from pipelines.jobs.training.request import RunSettings


def finished_result(run: RunSettings, fitting: FittingConfig, fingerprint: str) -> TrainResult | None:
    """Return the result of a training run if an earlier call finished it, else None.

    Args:
        run: settings with the output directory and the run folder.
        fitting: settings of the final score.
        fingerprint: fingerprint of the record in `run.json`.

    Returns:
        The earlier result. None if the run is not finished, or if its bundle is missing or was replaced.

    Raises:
        UsageError: the run was finished with other settings of the final score.
        EdjeError: `result.json` in the run folder cannot be read.
    """
    path = run.folder / RESULT
    if not path.exists() or not run.out.exists():
        return None
    result = _read_result(path, run.out)
    if (result.run, result.bundle, result.fingerprint) != (fingerprint, str(run.out), _bundle_fingerprint(run.out)):
        return None
    if result.fitting != fitting.model_dump():
        raise UsageError(
            f"{run.out} was trained with other settings of the final score (group 'fitting'); remove this folder to "
            "write the bundle again from the last checkpoint, or set run.out to another folder"
        )
    return replace(result, already_finished=True)


def _read_result(path: Path, out: Path) -> TrainResult:
    try:
        return TypeAdapter(TrainResult).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        raise EdjeError(
            f"cannot read {path}: {_first_problem(error)}; restore the file, or remove {out} to write the "
            "bundle again from the last checkpoint"
        ) from error


def _first_problem(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return str(error)
    problem = error.errors(include_url=False)[0]
    return ": ".join(filter(None, [".".join(map(str, problem["loc"])), problem["msg"]]))


def _bundle_fingerprint(bundle: Path) -> str | None:
    """Return the fingerprint of the bundle, or None if there is no bundle."""
    from edje_index.bundles.info import read_bundle_info
    from edje_index.errors import ModelError

    try:
        return read_bundle_info(bundle).fingerprint
    except ModelError:
        return None
