"""The last stage of a training run: fit the final score to the trained weights and write the bundle."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from edje_index.progress import OnProgress
from pipelines.jobs.training.preparation import Prepared
from pipelines.jobs.training.progress import stoppable_progress
from pipelines.jobs.training.request import TrainRequest
from pipelines.jobs.training.result import TrainResult
from pipelines.progress.events import OnEvent
from pipelines.progress.stopping import ShouldStop
from storage_formats.atomic import write_json_atomic

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.bundles.info import BundleInfo
    from edje_index.scoring.weights import DirectionWeights
    from edje_index.training.config import FittingConfig, TrainConfig
    from edje_index.training.fitting.fit_weights import WeightChoice

RESULT = "result.json"

Choices = dict[str, "WeightChoice"]
"""The fitted weights by direction; empty if none were fitted."""


@dataclass(frozen=True)
class FinishedModel:
    """A trained bundle with its final score.

    Attributes:
        bundle: the bundle, not saved yet.
        steps: steps of the joint phase.
        choices: how its weights were fitted.
        bank_unused: a hubness bank was made, but the hubness correction got no weight.
    """

    bundle: ModelBundle
    steps: int
    choices: Choices
    bank_unused: bool


def finish_training(
    request: TrainRequest,
    config: TrainConfig,
    prepared: Prepared,
    on_event: OnEvent,
    should_stop: ShouldStop,
    started: float,
) -> TrainResult:
    """Fit the final score to the last checkpoint, then write the bundle and `result.json`."""
    model = _finish_model(request, config, prepared, stoppable_progress(on_event, should_stop))
    model = replace(model, bundle=replace(model.bundle, notes=_notes(request, config, prepared, model.steps)))
    result = _result(request, config, prepared, model)

    def record(info: BundleInfo) -> None:
        # Written before the bundle appears: a bundle without its record would look like another run's.
        if not request.run.export:
            finished = replace(result, fingerprint=info.fingerprint, seconds=time.monotonic() - started)
            write_json_atomic(request.run.folder / RESULT, asdict(finished))

    info = model.bundle.save(request.run.out, record)
    return replace(result, fingerprint=info.fingerprint, seconds=time.monotonic() - started)


def _finish_model(
    request: TrainRequest, config: TrainConfig, prepared: Prepared, on_progress: OnProgress
) -> FinishedModel:
    from edje_index.training.fitting.finish import fit_to_training_data, trained_bundle

    task, fitting = prepared.task, config.fitting
    bundle, steps = trained_bundle(task.start, request.run.folder, task.run)
    bundle = fit_to_training_data(task, bundle, fitting, on_progress)
    choices = _choose_weights(bundle, request, fitting, prepared, on_progress)
    bundle = replace(bundle, score=_score(fitting, choices))
    bank_unused = bundle.hubness_bank is not None and not (bundle.score.t2i.hubness or bundle.score.i2t.hubness)
    if bank_unused:
        bundle = replace(bundle, hubness_bank=None)
    return FinishedModel(bundle, steps, choices, bank_unused)


def _choose_weights(
    bundle: ModelBundle,
    request: TrainRequest,
    fitting: FittingConfig,
    prepared: Prepared,
    on_progress: OnProgress,
) -> Choices:
    weights = [fitting.embedding_weight, fitting.late_weight]
    if fitting.pooled_dim:
        weights.append(fitting.pooled_weight)
    if prepared.dev is None or (None not in weights and bundle.hubness_bank is None):
        return {}
    from edje_index.training.data.batches import Features
    from edje_index.training.fitting.dev_pools import choose_dev_weights, make_dev_set

    index = prepared.task.features
    dev = make_dev_set(prepared.dev, bundle.text, index)
    features = Features(index, bundle.adapter.config)
    return choose_dev_weights(bundle, dev, features, fitting, request.run.device, on_progress)


def _score(fitting: FittingConfig, choices: Choices) -> DirectionWeights:
    """The fitted weights; without a fit those of the settings, and 0 for a weight that the settings leave open."""
    from edje_index.scoring.weights import DirectionWeights, ScoreWeights

    if choices:
        return DirectionWeights(**{direction: choice.weights for direction, choice in choices.items()})
    weights = ScoreWeights(
        late=fitting.late_weight or 0.0,
        pooled=(fitting.pooled_weight or 0.0) if fitting.pooled_dim else 0.0,
        embedding=fitting.embedding_weight or 0.0,
    )
    return DirectionWeights(weights, weights)


def _result(request: TrainRequest, config: TrainConfig, prepared: Prepared, model: FinishedModel) -> TrainResult:
    """The result without the fingerprint and the time."""
    from edje_index.training.loop.log import read_log

    records, score = read_log(request.run.folder), model.bundle.score
    return TrainResult(
        bundle=str(request.run.out),
        fingerprint="",
        run=prepared.task.run,
        images=prepared.images,
        captions=prepared.captions,
        left_out=prepared.left_out,
        steps=model.steps,
        seconds=0.0,
        last=records[-1] if records else {},
        score=score.to_json(),
        embedding_weight=score.t2i.embedding,
        late_weight=score.t2i.late,
        pooled_weight=score.t2i.pooled,
        prior_weight=score.t2i.hubness,
        caption_weights=score.i2t.by_part(),
        bank_unused=model.bank_unused,
        fitting=config.fitting.model_dump(),
        dev=_dev_json(model.choices),
    )


def _dev_json(choices: Choices) -> dict[str, Any] | None:
    """The choices by what is ranked: images in text-to-image search, captions in image-to-text search."""
    if not choices:
        return None
    return {"images": asdict(choices["t2i"]), "captions": asdict(choices["i2t"])}


def _notes(request: TrainRequest, config: TrainConfig, prepared: Prepared, steps: int) -> str:
    names = ", ".join(path.name for path in request.inputs.captions)
    teacher = f", distilled from {request.inputs.teacher.name}" if request.inputs.teacher else ""
    return (
        f"trained {steps} steps of {config.loop.batch_size * config.loop.accumulate} pairs on "
        f"{prepared.images} images with {prepared.captions} captions of {names}{teacher}; run {prepared.task.run}"
    )
