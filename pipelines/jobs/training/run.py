"""Runs a training: prepares the run folder, trains from the last checkpoint on, and writes the bundle."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.lock import locked_index
from pipelines.jobs.train_finish import RESULT, finish_training
from pipelines.jobs.training.captions import read_training_captions
from pipelines.jobs.training.preparation import prepare_training
from pipelines.jobs.training.progress import step_progress
from pipelines.jobs.training.request import RunSettings, TrainRequest, check_request
from pipelines.jobs.training.result import TrainResult
from pipelines.jobs.training.run_record import begin_run
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import FittingConfig, TrainConfig
    from edje_index.training.loop.task import TrainTask


def run_training(
    request: TrainRequest, config: TrainConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> TrainResult:
    """Train a model bundle. A training that was interrupted resumes if its settings are the same.

    Raises:
        UsageError, ModelError: the request cannot be served.
        JobStopped: `should_stop()` returned True; the same call resumes.
    """
    started = time.monotonic()
    run = request.run
    check_request(request.inputs, config)
    with locked_index(run.folder):
        _check_export(run)
        on_event(StatusMessage("reading captions"))
        captions = read_training_captions(request.inputs)
        fingerprint = begin_run(run.folder, request.inputs, config)
        if (finished := _finished(run, config.fitting, fingerprint)) is not None:
            return finished
        if run.out.exists():
            raise UsageError(f"{run.out} exists already; set run.out to another folder, or remove it")
        prepared = prepare_training(request, config, captions, fingerprint, on_event, should_stop)
        if not run.export:
            _train(prepared.task, run.workers, run.address, on_event, should_stop)
        return finish_training(request, config, prepared, on_event, should_stop, started)


def _check_export(run: RunSettings) -> None:
    if run.export and not (run.folder / "checkpoints").is_dir():
        raise UsageError(f"{run.folder} holds no checkpoint to export; is run.dir the folder of the training?")


def _finished(run: RunSettings, fitting: FittingConfig, fingerprint: str) -> TrainResult | None:
    """The result of this very training if it was finished before."""
    path = run.folder / RESULT
    if not path.exists() or not run.out.exists():
        return None
    result = TrainResult(**json.loads(path.read_text()))
    if (result.run, result.bundle, result.fingerprint) != (fingerprint, str(run.out), _fingerprint(run.out)):
        return None
    if result.fitting != fitting.model_dump():
        raise UsageError(
            f"{run.out} was finished with other settings of the final score (fitting); remove it to have it made again "
            "from the last checkpoint, or set run.out to another folder"
        )
    return replace(result, already_finished=True)


def _fingerprint(bundle: Path) -> str | None:
    """Fingerprint of a bundle; None if the folder holds none."""
    from edje_index.bundles.info import read_bundle_info
    from edje_index.errors import ModelError

    try:
        return read_bundle_info(bundle).fingerprint
    except ModelError:
        return None


def _train(task: TrainTask, workers: int, address: str | None, on_event: OnEvent, should_stop: ShouldStop) -> None:
    """Run all steps, in this process or on Ray."""
    from edje_index.training.loop.distributed import WorkerGroup
    from edje_index.training.loop.train_worker import check_batch_split, run_worker
    from edje_index.training.loop.training_loop import TrainingStopped

    check_batch_split(task.config.loop.batch_size, workers)
    report = step_progress(on_event)
    try:
        if workers == 1 and address is None:
            run_worker(task, WorkerGroup(), should_stop, report)
        else:
            from pipelines.engines.ray_train import train_on_ray

            train_on_ray(task, workers, address=address, should_stop=should_stop, on_record=report)
    except TrainingStopped as error:
        raise JobStopped(str(error)) from error
