"""The bundle of the last checkpoint of a training run."""

from __future__ import annotations

from dataclasses import replace

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.weights import State
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.task import TrainTask
from edje_index.training.model.trained_part import trained_part


def trained_bundle(task: TrainTask, start: ModelBundle) -> tuple[ModelBundle, int]:
    """`start` with the weights of the last checkpoint, which are loaded into it, and the number of steps of its phase.

    Raises:
        ModelError: the run has no checkpoint of its last phase yet.
    """
    run_dir = task.runtime.run_dir
    state = Checkpoints(run_dir, task.run).latest()
    if state is None or not any(name.startswith("joint.") for name in state.weights):
        raise ModelError(f"{run_dir} holds no checkpoint with a joint encoder yet: continue the training")
    trained_part(start.adapter).load_state_dict(_with_prefix(state.weights, "adapter."))
    start.joint.load_state_dict(_with_prefix(state.weights, "joint."))
    return replace(start, trained=True, info=None), state.step


def _with_prefix(weights: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
