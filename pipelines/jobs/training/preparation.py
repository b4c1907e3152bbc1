"""From a request to the task of the workers, one value at a time. What is in the run folder already is reused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.captions import Captions
from pipelines.jobs.training.features import MatchedCaptions, feature_index, match_captions
from pipelines.jobs.training.index_builder import IndexBuilder
from pipelines.jobs.training.mining import other_miner, tower_miner
from pipelines.jobs.training.progress import stoppable_progress
from pipelines.jobs.training.request import TrainingInputs, TrainRequest
from pipelines.jobs.training.start import StartModel, start_model
from pipelines.jobs.training.teacher import teacher_task
from pipelines.jobs.training.views import computed_views, given_views
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig
    from edje_index.training.data.dataset import CaptionSet, Miner
    from edje_index.training.loop.task import TrainTask, ViewTask


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
    from edje_index.training.loop.task import Runtime, TrainTask
    from edje_index.training.loop.train_worker import total_steps

    inputs, folder = request.inputs, request.run.folder
    total_steps(config.loop, len(captions.trained))
    builder = IndexBuilder(folder, request.run, config.loop.dtype, on_event, should_stop)
    on_event(StatusMessage("loading the initial model"))
    start = start_model(folder, inputs, config.architecture, config.loop.seed)
    features = feature_index(inputs.features, start, [*captions.trained, *captions.dev], builder)
    matched = match_captions(features, captions.trained)
    _report_left_out(matched.left_out, on_event)
    miner, temperature = _miner(inputs, start, features, matched, builder)
    data = _prepared_data(folder / "data", start, matched.captions, miner, builder)
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
        temperature=temperature if config.negatives.temperature is None else config.negatives.temperature,
        teacher=teacher_task(
            inputs.teacher, inputs.teacher_features or features, start, matched.items, folder / "teacher-rows.npy"
        )
        if inputs.teacher
        else None,
        new_adapter=start.new_adapter,
        views=_views(inputs.view_features, config, start, matched, builder),
    )
    total_steps(config.loop, len(matched.items))
    dev = match_captions(features, captions.dev).captions if captions.dev else None
    return Prepared(task, len(matched.items), len(matched.captions.texts()), matched.left_out, dev)


def _report_left_out(left_out: dict[str, int], on_event: OnEvent) -> None:
    if left_out:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        on_event(StatusMessage(f"left out, without features: {reasons}"))


def _miner(
    inputs: TrainingInputs, start: StartModel, features: Path, matched: MatchedCaptions, builder: IndexBuilder
) -> tuple[Miner, float]:
    if inputs.miner is None:
        return tower_miner(start, features, matched)
    return other_miner(inputs.miner, inputs.miner_features, matched, builder)


def _prepared_data(path: Path, start: StartModel, captions: CaptionSet, miner: Miner, builder: IndexBuilder) -> Path:
    """The folder of the captions as tokens and embeddings. UsageError if it was made from other captions."""
    from edje_index.training.data.dataset import TrainingData, prepare_data

    if not path.exists():
        progress = stoppable_progress(builder.on_event, builder.should_stop)
        prepare_data(captions, start.bundle.joint.tokenizer, start.bundle.text, miner, progress).save(path)
    if TrainingData.open(path).images != len(captions.rows):
        raise UsageError(f"{path} was made from other captions; set run.dir to another folder")
    return path


def _views(
    given: Path | None, config: TrainConfig, start: StartModel, matched: MatchedCaptions, builder: IndexBuilder
) -> ViewTask | None:
    count = config.augmentation.views
    if not count:
        return None
    if given is not None:
        return given_views(given, count, start, matched.items, builder.folder)
    return computed_views(count, config.loop.seed, start, matched.items, builder)
