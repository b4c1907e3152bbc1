"""Makes a bundle from the last checkpoint of a training run, and fits what is not trained by gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.devices import resolve_device
from edje_index.models.weights import State
from edje_index.progress import OnProgress
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.pooled_similarity import PooledSimilarity
from edje_index.training.data.batches import BatchSource
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


def fit_trained_similarity(task: TrainTask, bundle: ModelBundle, dim: int, on_progress: OnProgress) -> PooledSimilarity:
    """Fit the pooled similarity of a trained bundle to its training data, on the task's device."""
    adapter, source = _on_device(task, bundle)
    return fit_pooled_similarity(adapter, bundle.joint, source, dim, on_progress).to(bundle.joint.device)


def make_trained_bank(task: TrainTask, bundle: ModelBundle, count: int, on_progress: OnProgress) -> HubnessBank:
    """Make the hubness bank of a trained bundle from its training data, on the task's device."""
    adapter, source = _on_device(task, bundle)
    if bundle.pooled is not None:
        bundle.pooled.to(bundle.joint.device)
    bank = make_hubness_bank(adapter, bundle.pooled_vectors, source, task.features, count, on_progress)
    return bank.to(bundle.joint.device)


def _on_device(task: TrainTask, bundle: ModelBundle) -> tuple[nn.Module, BatchSource]:
    """(the trained part of the adapter, the training data), with the bundle on the task's device."""
    device = resolve_device(task.runtime.device)
    bundle.adapter.to(device).eval()
    bundle.joint.to(device).eval()
    return trained_part(bundle.adapter), batch_source(task, bundle, WorkerGroup())


def _with_prefix(weights: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
