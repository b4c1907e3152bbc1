"""From the last checkpoint of a finished training to its bundle, and what is fitted to that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.devices import resolve_device
from edje_index.models.weights import State
from edje_index.scoring.hubness import QueryBank
from edje_index.scoring.pooled_similarity import PooledSimilarity
from edje_index.training.fitting.hubness_bank import make_bank
from edje_index.training.fitting.pooled_similarity import OnProgress, fit_pooled
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.task import TrainTask
from edje_index.training.loop.train_worker import batch_source
from edje_index.training.model.objectives import trained_part


def trained_bundle(start: Path, run_dir: Path, run: str, notes: str) -> tuple[ModelBundle, int]:
    """The start's towers with the trained adapter and joint encoder, and the steps that they were trained for.

    Raises:
        ModelError: no checkpoint of this run's last phase.
    """
    state = Checkpoints(run_dir, run).latest()
    if state is None or not any(name.startswith("joint.") for name in state.weights):
        raise ModelError(f"{run_dir} holds no checkpoint with a joint encoder yet: train on")
    bundle = ModelBundle.load(start, verify=False)
    trained_part(bundle.adapter).load_state_dict(_part(state.weights, "adapter."))
    bundle.joint.load_state_dict(_part(state.weights, "joint."))
    return replace(bundle, trained=True, notes=notes, info=None), state.step


def fit_trained(task: TrainTask, bundle: ModelBundle, dim: int, on_progress: OnProgress) -> PooledSimilarity:
    """The pooled similarity of a trained bundle over what it was trained on, see `pooled`; on the task's device."""
    device = resolve_device(task.runtime.device)
    bundle.adapter.to(device).eval()
    bundle.joint.to(device).eval()
    source = batch_source(task, bundle, WorkerGroup())
    return fit_pooled(trained_part(bundle.adapter), bundle.joint, source, dim, on_progress).to(device)


def bank_of_trained(task: TrainTask, bundle: ModelBundle, count: int, on_progress: OnProgress) -> QueryBank:
    """A query bank of what a trained bundle was trained on, see `bank`; on the task's device."""
    device = resolve_device(task.runtime.device)
    bundle.adapter.to(device).eval()
    bundle.joint.to(device).eval()
    source = batch_source(task, bundle, WorkerGroup())
    return make_bank(trained_part(bundle.adapter), bundle.joint, source, task.features, count, on_progress).to(device)


def _part(weights: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
