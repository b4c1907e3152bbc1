"""Runs the optimiser steps of a prepared training run, in this process or on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.jobs.training.progress import step_progress
from pipelines.progress.events import JobStopped, OnEvent, ShouldStop, StatusMessage

if TYPE_CHECKING:
    from edje_index.training.loop.task import TrainTask


def run_steps(task: TrainTask, on_event: OnEvent, should_stop: ShouldStop) -> None:
    """Train from the last checkpoint to the last step.

    Raises:
        JobStopped: `should_stop()` returned True. The last checkpoint contains all finished steps.
    """
    from edje_index.training.loop.distributed import WorkerGroup
    from edje_index.training.loop.train_worker import run_worker
    from edje_index.training.loop.training_loop import TrainingStopped

    report = step_progress(on_event)
    try:
        if task.runtime.workers == 1 and task.runtime.address is None:
            run_worker(task, WorkerGroup(), should_stop, report)
        else:
            from pipelines.engines.ray_train import train_on_ray

            train_on_ray(task, should_stop, report, on_notice=lambda text: on_event(StatusMessage(text)))
    except TrainingStopped as error:
        raise JobStopped(str(error)) from None  # with a cause, the stop would not count as requested
