"""Makes the task of the workers from a request, one value at a time. Existing parts of the run folder are reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.jobs.training.data import prepared_data
from pipelines.jobs.training.features import feature_index
from pipelines.jobs.training.index_builder import IndexBuilder
from pipelines.jobs.training.matching import match_captions
from pipelines.jobs.training.mining import open_miner
from pipelines.jobs.training.progress import stoppable_progress
from pipelines.jobs.training.read_inputs import ReadInputs
from pipelines.jobs.training.request import TrainRequest
from pipelines.jobs.training.start import start_model
from pipelines.jobs.training.task import FinishTask, RunTask, worker_runtime
from pipelines.jobs.training.teacher import teacher_task
from pipelines.jobs.training.views import view_task
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop

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
    """Make what is missing in the run folder.

    Args:
        given: the captions and indexes of the request.
        run: fingerprint of everything that decides the training.

    Raises:
        UsageError, ModelError: an input does not fit.
        JobStopped: `should_stop()` returned True; finished parts are kept.
    """
    from edje_index.training.data.dataset import DevCaptions
    from edje_index.training.loop.schedule import total_steps
    from edje_index.training.loop.task import TrainTask
    from storage_formats.reading.embeddings import read_embeddings

    inputs, folder = request.inputs, request.run.folder
    captions = given.captions
    total_steps(config.loop, captions.pairs(config.loop.epoch_of))
    builder = IndexBuilder(folder, request.run, config.loop.dtype, on_event, should_stop)
    progress = stoppable_progress(on_event, should_stop)
    on_event(StatusMessage("loading the initial model"))
    start = start_model(folder, inputs, config.architecture, config.loop.seed)
    features = feature_index(given.features, start, [*captions.trained, *captions.dev], builder)
    matched = match_captions(features, captions, on_event)
    miner_index = features if inputs.miner is None else given.miner_features
    miner = open_miner(inputs.miner, miner_index, start, matched, builder)
    dev = None
    if matched.dev is not None:
        dev = DevCaptions(matched.dev, read_embeddings(features.root, features.manifest.spec, matched.dev.rows))
    data = prepared_data(folder / "data", start, matched.captions, miner, progress)
    teacher = None
    if inputs.teacher is not None:
        teacher = teacher_task(inputs.teacher, given.teacher_features or features, start, matched.items, folder)
    views = view_task(given.view_features, config, start, matched.items, builder)
    total_steps(config.loop, matched.captions.pairs(config.loop.epoch_of))
    task = TrainTask(
        config=config,
        runtime=worker_runtime(request.run),
        run=run,
        start=start.path,
        features=features,
        data=data,
        temperature=miner.temperature_for(config.negatives),
        teacher=teacher,
        new_adapter=start.new_adapter,
        views=views,
        dev=dev,
    )
    return RunTask(task, FinishTask.of(request, matched))
