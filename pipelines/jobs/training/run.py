"""Runs the training job: prepares the run folder, trains, and writes the bundle."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pipelines.jobs.lock import locked_index
from pipelines.jobs.train_finish import finish_training
from pipelines.jobs.training.finished import finished_result
from pipelines.jobs.training.preparation import prepare_training
from pipelines.jobs.training.read_inputs import read_inputs
from pipelines.jobs.training.record import training_record
from pipelines.jobs.training.request import TrainRequest, check_request
from pipelines.jobs.training.result import TrainResult
from pipelines.jobs.training.run_folder import begin_run
from pipelines.jobs.training.steps import run_steps
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig


def run_training(
    request: TrainRequest, config: TrainConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> TrainResult:
    """Train a model bundle, or resume an interrupted training run with the same settings.

    Raises:
        UsageError: a setting is invalid, an input cannot be read, or the run folder belongs to another training run.
        ModelError: a bundle or language model cannot be used.
        JobStopped: `should_stop()` returned True. The last checkpoint is kept.
        EdjeError: another process uses the run folder, or a file in the run folder is damaged.
    """
    started = time.monotonic()
    run = request.run
    check_request(request, config)
    with locked_index(run.folder):
        if run.export and not (run.folder / "checkpoints").is_dir():
            raise UsageError(f"{run.folder} has no checkpoint to export; set run.dir to the folder of a training run")
        on_event(StatusMessage("reading captions"))
        given = read_inputs(request.inputs)
        fingerprint = begin_run(run.folder, training_record(request.inputs, given, config))
        if (finished := finished_result(run, config.fitting, fingerprint)) is not None:
            return finished
        if run.out.exists():
            raise UsageError(f"{run.out} exists already; remove this folder, or set run.out to another folder")
        task = prepare_training(request, config, given, fingerprint, on_event, should_stop)
        if not run.export:
            run_steps(task.train, on_event, should_stop)
        return finish_training(task, on_event, should_stop, started)
