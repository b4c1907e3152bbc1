"""The last stage of a training run: fits the final score and writes the bundle."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pipelines.jobs.training.progress import stoppable_progress
from pipelines.jobs.training.result import TrainResult, training_result
from pipelines.jobs.training.task import RunTask
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.atomic import write_json_atomic

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo

RESULT = "result.json"


def finish_training(task: RunTask, on_event: OnEvent, should_stop: ShouldStop, started: float) -> TrainResult:
    """Fit the weights of the final score for a checkpoint. Then write the bundle and `result.json`.

    Args:
        task: task of the training run.
        on_event: called with each progress event.
        should_stop: the job stops once `should_stop()` returns True.
        started: value of `time.monotonic` when the job began.

    Raises:
        JobStopped: `should_stop()` returned True. The next run repeats this stage.
    """
    from edje_index.training.fitting.finish import finish_model

    train, finish = task.train, task.finish
    model = finish_model(train, finish.step, stoppable_progress(on_event, should_stop))
    result = training_result(task, model)

    def record(info: BundleInfo) -> None:
        # Written before the bundle appears: a bundle without its record would look like another run's.
        if not finish.export:
            finished = replace(result, fingerprint=info.fingerprint, seconds=time.monotonic() - started)
            write_json_atomic(train.runtime.run_dir / RESULT, asdict(finished))

    pairs = train.config.loop.batch_size * train.config.loop.accumulate
    notes = f"trained {model.steps} steps of {pairs} pairs on {finish.trained_on}; run {train.run}"
    info = replace(model.bundle, notes=notes).save(finish.out, record)
    return replace(result, fingerprint=info.fingerprint, seconds=time.monotonic() - started)
