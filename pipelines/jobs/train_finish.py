"""The last part of the train job: what is fitted to the trained weights, and the bundle."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
    from edje_index.scoring.weights import ScoreWeights
    from edje_index.training.config import FittingConfig, TrainConfig
    from edje_index.training.fitting.selection import WeightChoices
    from edje_index.training.fitting.weight_choice import WeightChoice

RESULT = "result.json"


def finish_training(
    request: TrainRequest,
    config: TrainConfig,
    prepared: Prepared,
    on_event: OnEvent,
    should_stop: ShouldStop,
    started: float,
) -> TrainResult:
    """Fit the score to the last checkpoint and write the bundle and `result.json`."""
    from edje_index.training.fitting.finish import bank_of_trained, fit_trained, trained_bundle
    from edje_index.training.loop.log import read_log

    task = prepared.task
    bundle, steps = trained_bundle(task.start, request.run.folder, task.run, "")
    if config.fitting.pooled_dim:
        progress = partial(stoppable_progress(on_event, should_stop), "fitting the pooled similarity")
        bundle.joint.pooled = fit_trained(task, bundle, config.fitting.pooled_dim, progress)
    if config.fitting.hubness_bank:
        progress = partial(stoppable_progress(on_event, should_stop), "gathering the query bank")
        bundle.bank = bank_of_trained(task, bundle, config.fitting.hubness_bank, progress)
    choice = _choose_weights(bundle, request, config, prepared, on_event, should_stop)
    weights = _given_weights(config.fitting) if choice is None else choice.images.weights
    bundle.joint.late_weight, bundle.joint.pooled_weight = weights.late, weights.pooled
    bundle = replace(
        bundle,
        notes=_notes(request, config, prepared, steps),
        embedding_weight=weights.similarity,
        prior_weight=weights.prior,
        prior_temperature=weights.temperature,
        own_caption_weights=None if choice is None else choice.captions.weights,
    )
    bank_unused = bundle.bank is not None and not (bundle.weights.prior or bundle.caption_weights.prior)
    if bank_unused:
        bundle.bank = None
    records = read_log(request.run.folder)
    result = TrainResult(
        bundle=str(request.run.out),
        fingerprint="",
        run=task.run,
        images=prepared.images,
        captions=prepared.captions,
        left_out=prepared.left_out,
        steps=steps,
        seconds=time.monotonic() - started,
        last=records[-1] if records else {},
        embedding_weight=bundle.embedding_weight,
        late_weight=bundle.joint.late_weight,
        pooled_weight=bundle.joint.pooled_weight,
        prior_weight=bundle.prior_weight,
        caption_weights=bundle.caption_weights._asdict(),
        bank_unused=bank_unused,
        fitting=config.fitting.model_dump(),
        dev=None if choice is None else {"images": _as_json(choice.images), "captions": _as_json(choice.captions)},
    )

    def record(info: BundleInfo) -> None:
        # A bundle without a record would be taken for somebody else's; a record without its bundle is made good.
        if not request.run.export:
            write_json_atomic(request.run.folder / RESULT, asdict(replace(result, fingerprint=info.fingerprint)))

    return replace(result, fingerprint=bundle.save(request.run.out, record).fingerprint)


def _as_json(choice: WeightChoice) -> dict[str, Any]:
    return {**asdict(choice), "weights": choice.weights._asdict()}


def _given_weights(fitting: FittingConfig) -> ScoreWeights:
    """Those of the settings; 0 for one that was to be looked for, and of a pooled similarity that is not there."""
    from edje_index.scoring.weights import ScoreWeights

    pooled = fitting.pooled_weight if fitting.pooled_dim else None
    return ScoreWeights(fitting.embedding_weight or 0.0, fitting.late_weight or 0.0, pooled or 0.0)


def _choose_weights(
    bundle: ModelBundle,
    request: TrainRequest,
    config: TrainConfig,
    prepared: Prepared,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> WeightChoices | None:
    fitting = config.fitting
    weights = [fitting.embedding_weight, fitting.late_weight]
    if fitting.pooled_dim:
        weights.append(fitting.pooled_weight)
    if prepared.dev is None or (None not in weights and bundle.bank is None):
        return None
    from edje_index.training.data.batches import Features
    from edje_index.training.fitting.selection import choose_weights, make_dev_set

    progress = partial(stoppable_progress(on_event, should_stop), "fitting the score weights")
    features = prepared.task.features
    dev = make_dev_set(prepared.dev, bundle.text, features)
    found = Features(features, bundle.adapter.config)
    return choose_weights(bundle, dev, found, fitting, request.run.device, progress)


def _notes(request: TrainRequest, config: TrainConfig, prepared: Prepared, steps: int) -> str:
    names = ", ".join(path.name for path in request.inputs.captions)
    teacher = f", distilled from {request.inputs.teacher.name}" if request.inputs.teacher else ""
    return (
        f"trained {steps} steps of {config.loop.batch_size * config.loop.accumulate} pairs on "
        f"{prepared.images} images with {prepared.captions} captions of {names}{teacher}; run {prepared.task.run}"
    )
