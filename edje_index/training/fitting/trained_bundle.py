"""Makes a bundle from a checkpoint of a training run."""

from __future__ import annotations

from dataclasses import replace

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.weights import State
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.task import TrainTask
from edje_index.training.model.trained_part import trained_part


def trained_bundle(task: TrainTask, start: ModelBundle, step: int | None = None) -> tuple[ModelBundle, int]:
    """Load the weights of a checkpoint into the modules of `start`.

    Args:
        task: task of the training run.
        start: initial bundle of the training run. Its weights are overwritten.
        step: step of the checkpoint; None means the last checkpoint.

    Returns:
        The trained bundle, and the number of finished steps of the joint phase.

    Raises:
        ModelError: the run has no checkpoint of `step` in the joint phase, or the checkpoint cannot be read.
    """
    run_dir = task.runtime.run_dir
    checkpoints = Checkpoints(run_dir, task.run)
    state = checkpoints.latest() if step is None else checkpoints.at(step)
    if state is None or not any(name.startswith("joint.") for name in state.weights):
        raise ModelError(f"{run_dir} has no checkpoint of the joint phase yet; resume the training run")
    trained_part(start.adapter).load_state_dict(_with_prefix(state.weights, "adapter."))
    start.joint.load_state_dict(_with_prefix(state.weights, "joint."))
    return replace(start, trained=True, info=None), state.step


def _with_prefix(weights: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
