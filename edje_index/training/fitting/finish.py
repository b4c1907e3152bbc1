"""Makes a bundle from a checkpoint of a training run, and fits the final score of the bundle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edje_index.bundles.bundle import ModelBundle
from edje_index.progress import OnProgress
from edje_index.scoring.weights import DirectionWeights, ScoreWeights
from edje_index.training.config import FittingConfig
from edje_index.training.fitting.dev_pools import choose_dev_weights, make_dev_set
from edje_index.training.fitting.fit_weights import WeightChoice
from edje_index.training.fitting.hubness_bank import make_hubness_bank
from edje_index.training.fitting.pooled_similarity import fit_pooled_similarity
from edje_index.training.fitting.trained_bundle import trained_bundle
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.opened_task import open_task
from edje_index.training.loop.task import TrainTask
from edje_index.training.model.trained_part import trained_part


@dataclass(frozen=True)
class FinishedModel:
    """A trained bundle with the weights of its final score.

    Attributes:
        bundle: the trained bundle, not saved yet.
        steps: number of finished steps of the joint phase.
        choices: weights and recall by direction; empty if no weights were fitted.
        bank_unused: True if a hubness bank was made but the bundle does not contain it, because the hubness correction
            has weight 0 in both directions.
    """

    bundle: ModelBundle
    steps: int
    choices: dict[str, WeightChoice]
    bank_unused: bool


def finish_model(task: TrainTask, step: int | None, on_progress: OnProgress) -> FinishedModel:
    """Make a bundle from a checkpoint. Its final score follows the settings in ``task.config.fitting``.

    Weights that are None in the settings are fitted to the dev captions. Without dev captions, these weights are 0.

    Args:
        task: task of the training run.
        step: step of the checkpoint; None means the last checkpoint.
        on_progress: called with the progress. An exception raised by `on_progress` stops this function.

    Raises:
        ModelError: the run has no checkpoint of `step` in the joint phase, or the checkpoint cannot be read.
    """
    fitting, dev = task.config.fitting, task.dev
    given_weights = [fitting.embedding_weight, fitting.late_weight]
    if fitting.pooled_dim:
        given_weights.append(fitting.pooled_weight)
    fits_weights = dev is not None and (None in given_weights or fitting.hubness_bank > 0)
    score = _score_of_settings(fitting)
    opened = open_task(replace(task, teacher=None), WorkerGroup())
    bundle, steps = trained_bundle(task, opened.start, step)
    choices: dict[str, WeightChoice] = {}
    if fitting.pooled_dim or fitting.hubness_bank or fits_weights:
        device, source = opened.device, opened.source
        bundle.adapter.to(device).eval()
        bundle.joint.to(device).eval()
        adapter = trained_part(bundle.adapter)
        if fitting.pooled_dim:
            pooled = fit_pooled_similarity(adapter, bundle.joint, source, fitting.pooled_dim, on_progress)
            bundle = replace(bundle, pooled=pooled.to(device).eval())
        if fitting.hubness_bank:
            vectors, count = bundle.pooled_vectors, fitting.hubness_bank
            bank = make_hubness_bank(adapter, vectors, source, count, on_progress)
            bundle = replace(bundle, hubness_bank=bank.to(device).eval())
        if dev is not None and fits_weights:
            dev_set = make_dev_set(dev, bundle.text.encode(dev.captions.texts()))
            choices = choose_dev_weights(bundle, dev_set, source.features, fitting, on_progress)
            score = DirectionWeights(**{direction: choice.weights for direction, choice in choices.items()})
    bundle = replace(bundle, score=score)
    bank_unused = bundle.hubness_bank is not None and not (bundle.score.t2i.hubness or bundle.score.i2t.hubness)
    if bank_unused:
        bundle = replace(bundle, hubness_bank=None)
    return FinishedModel(bundle, steps, choices, bank_unused)


def _score_of_settings(fitting: FittingConfig) -> DirectionWeights:
    """Return the weights in the settings, with 0 for None."""
    weights = ScoreWeights(
        late=fitting.late_weight or 0.0,
        pooled=(fitting.pooled_weight or 0.0) if fitting.pooled_dim else 0.0,
        embedding=fitting.embedding_weight or 0.0,
    )
    return DirectionWeights(weights, weights)
