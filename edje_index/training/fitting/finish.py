"""Makes a bundle from the last checkpoint of a training run, and fits what is not trained by gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.devices import resolve_device
from edje_index.models.weights import State
from edje_index.progress import OnProgress
from edje_index.training.config import FittingConfig
from edje_index.training.fitting.hubness_bank import make_hubness_bank
from edje_index.training.fitting.pooled_similarity import fit_pooled_similarity
from edje_index.training.loop.batch_source import batch_source
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.task import TrainTask
from edje_index.training.model.trained_part import trained_part


def trained_bundle(start: Path, run_dir: Path, run: str) -> tuple[ModelBundle, int]:
    """The bundle of the last checkpoint, and the number of steps it was trained for.

    Args:
        start: the bundle that the training started from; its towers are kept.
        run_dir: the run directory.
        run: fingerprint of the run.

    Raises:
        ModelError: the run has no checkpoint of its last phase yet.
    """
    state = Checkpoints(run_dir, run).latest()
    if state is None or not any(name.startswith("joint.") for name in state.weights):
        raise ModelError(f"{run_dir} holds no checkpoint with a joint encoder yet: continue the training")
    bundle = ModelBundle.load(start, verify=False)
    trained_part(bundle.adapter).load_state_dict(_with_prefix(state.weights, "adapter."))
    bundle.joint.load_state_dict(_with_prefix(state.weights, "joint."))
    return replace(bundle, trained=True, info=None), state.step


def fit_to_training_data(
    task: TrainTask, bundle: ModelBundle, fitting: FittingConfig, on_progress: OnProgress
) -> ModelBundle:
    """The trained `bundle` with the pooled similarity and the hubness bank that `fitting` enables, on the device."""
    if not (fitting.pooled_dim or fitting.hubness_bank):
        return bundle
    device = resolve_device(task.runtime.device)
    adapter, joint = trained_part(bundle.adapter.to(device).eval()), bundle.joint.to(device).eval()
    source = batch_source(task, bundle, WorkerGroup())
    if fitting.pooled_dim:
        pooled = fit_pooled_similarity(adapter, joint, source, fitting.pooled_dim, on_progress).to(device)
        bundle = replace(bundle, pooled=pooled)
    if fitting.hubness_bank:
        vectors, count = bundle.pooled_vectors, fitting.hubness_bank
        bank = make_hubness_bank(adapter, vectors, source, task.features, count, on_progress).to(device)
        bundle = replace(bundle, hubness_bank=bank)
    return bundle


def _with_prefix(weights: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
