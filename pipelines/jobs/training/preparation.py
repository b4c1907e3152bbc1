"""Makes the task of the workers from a request, one value at a time. Existing parts of the run folder are reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.jobs.training.captions import Captions
from pipelines.jobs.training.data import prepared_data
from pipelines.jobs.training.features import feature_index
from pipelines.jobs.training.index_builder import IndexBuilder
from pipelines.jobs.training.matching import match_captions
from pipelines.jobs.training.mining import open_miner
from pipelines.jobs.training.progress import stoppable_progress
from pipelines.jobs.training.request import TrainRequest
from pipelines.jobs.training.start import start_model
from pipelines.jobs.training.teacher import teacher_task
from pipelines.jobs.training.views import view_task
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig
    from edje_index.training.data.dataset import CaptionSet
    from edje_index.training.loop.task import TrainTask


@dataclass(frozen=True)
class Prepared:
    """A training that is ready to run.

    Attributes:
        task: for the workers.
        images, captions: numbers of images and captions to train on.
        left_out: number of images without features, by reason.
        dev: dev captions; None without any.
    """

    task: TrainTask
    images: int
    captions: int
    left_out: dict[str, int]
    dev: CaptionSet | None


def prepare_training(
    request: TrainRequest,
    config: TrainConfig,
    captions: Captions,
    run: str,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> Prepared:
    """Make what is missing in the run folder.

    Args:
        run: fingerprint of everything that decides the training.

    Raises:
        UsageError, ModelError: an input does not fit.
        JobStopped: `should_stop()` returned True; finished parts are kept.
    """
    from edje_index.training.loop.schedule import total_steps
    from edje_index.training.loop.task import Runtime, TrainTask

    inputs, folder = request.inputs, request.run.folder
    total_steps(config.loop, len(captions.trained))
    builder = IndexBuilder(folder, request.run, config.loop.dtype, on_event, should_stop)
    progress = stoppable_progress(on_event, should_stop)
    on_event(StatusMessage("loading the initial model"))
    start = start_model(folder, inputs, config.architecture, config.loop.seed)
    features = feature_index(inputs.features, start, [*captions.trained, *captions.dev], builder)
    matched = match_captions(features, captions, on_event)
    miner = open_miner(inputs, start, features, matched, builder)
    data = prepared_data(folder / "data", start, matched.captions, miner, progress)
    teacher = teacher_task(inputs, features, start, matched.items, folder)
    views = view_task(inputs.view_features, config, start, matched.items, builder)
    total_steps(config.loop, len(matched.items))
    task = TrainTask(
        config=config,
        runtime=Runtime(
            run_dir=folder,
            device=request.run.device,
            threads=request.run.threads,
            checkpoint_every=request.run.checkpoint_every,
            log_every=request.run.log_every,
            compile=request.run.compile,
        ),
        run=run,
        start=start.path,
        features=features,
        data=data,
        temperature=miner.temperature if config.negatives.temperature is None else config.negatives.temperature,
        teacher=teacher,
        new_adapter=start.new_adapter,
        views=views,
    )
    return Prepared(task, len(matched.items), len(matched.captions.texts()), matched.left_out, matched.dev)
