"""Prepares the task of a training run from a request. Existing parts of the run folder are reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.jobs.training.data import prepared_data
from pipelines.jobs.training.indexes import (
    ONLINE_INPUTS,
    IndexBuilder,
    feature_index,
    further_indexes,
    online_index,
)
from pipelines.jobs.training.matching import further_rows, match_captions
from pipelines.jobs.training.read_inputs import ReadInputs
from pipelines.jobs.training.request import ONLINE, TrainRequest
from pipelines.jobs.training.start import start_model
from pipelines.jobs.training.task import FinishTask, RunTask, worker_runtime
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig


def prepare_training(
    request: TrainRequest,
    config: TrainConfig,
    given: ReadInputs,
    run: str,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> RunTask:
    """Make the missing parts of the run folder, and return the task of the training run.

    Args:
        request: request for the training run.
        config: training settings.
        given: captions and indexes that the request names.
        run: fingerprint of everything that determines the trained weights.
        on_event: called with each progress event.
        should_stop: the preparation stops once `should_stop()` returns True.

    Raises:
        UsageError: a caption file or an index cannot be used for the request.
        ModelError: a bundle or language model cannot be used.
        JobStopped: `should_stop()` returned True; finished parts are kept.
    """
    from edje_index.training.loop.feature_task import OnlineTask, StoredTask
    from edje_index.training.loop.schedule import total_steps
    from edje_index.training.loop.task import TrainTask

    inputs, folder, captions = request.inputs, request.run.folder, given.captions
    dtype, frames = config.loop.dtype, config.architecture.frames
    builder = IndexBuilder(
        folder, request.run, dtype, on_event, should_stop, inputs.truncated, frames, inputs.feature_precision
    )
    on_event(StatusMessage("loading the initial model"))
    start = start_model(folder, inputs, config.architecture, config.loop.seed)
    images = [*captions.trained, *captions.dev]
    if inputs.features == ONLINE:
        features = online_index(start, images, builder)
    else:
        features = feature_index(given.features, start, images, builder)
    matched = match_captions(features, captions, on_event, truncated=inputs.truncated)
    steps = total_steps(config.loop, matched.captions.pairs(config.loop.epoch_of))
    indexes = further_indexes(inputs, given, config, start, matched, builder)
    rows = further_rows(inputs, config, indexes, matched, folder)
    data = prepared_data(start, matched, rows.mining, config.negatives, builder)
    online = OnlineTask(features, folder / ONLINE_INPUTS, inputs.truncated) if inputs.features == ONLINE else None
    task = TrainTask(
        config=config,
        runtime=worker_runtime(request.run),
        run=run,
        start=start.path,
        features=online or StoredTask(features, rows.views),
        data=data.folder,
        temperature=data.temperature,
        steps=steps,
        teacher=rows.teacher,
        new_adapter=start.new_adapter,
        dev=data.dev,
    )
    return RunTask(task, FinishTask.of(request, matched))
