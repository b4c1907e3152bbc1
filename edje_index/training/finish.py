"""Makes a bundle from a checkpoint of a training run, and fits the final score of
the bundle.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.devices import resolve_device
from edje_index.progress import OnProgress
from edje_index.scoring.weights import DIRECTIONS, TEXT_TO_IMAGE, DirectionWeights
from edje_index.training.checkpoints import last_checkpoint
from edje_index.training.dataset import TrainingData
from edje_index.training.fit_weights import WeightChoice, choose_weights, dev_pools
from edje_index.training.loop import TrainTask, open_start
from edje_index.training.pooled_similarity import fit_pooled_similarity
from edje_index.training.start import trained_part
from edje_index.training.workers import ALONE
from storage_formats.codecs import BF16
from storage_formats.format.offset import estimate_offset

# Number of training images from which the offset block, the mean of their blocks, is
# estimated. The noise of a mean of n blocks adds about the fraction 1/n to the squared
# error of quantized tokens.
_OFFSET_IMAGES = 256


def finish_model(
    task: TrainTask, on_progress: OnProgress
) -> tuple[ModelBundle, int, dict[str, WeightChoice]]:
    """Make a bundle from the last checkpoint, and fit its final score with the settings
    in ``task.config.fitting``.

    The weights of the final score are fitted to the dev captions. Without dev captions,
    the final score is the logit alone.

    Args:
        on_progress: called with the activity and its progress. An exception raised by
            `on_progress` stops this function.

    Returns:
        The trained bundle, which is not saved yet; the number of finished steps of the
        joint phase; and the fitted weights and the recall of each direction. The last
        value is empty if no weights were fitted.

    Raises:
        ModelError: the run folder has no checkpoint of the joint phase.
    """
    fitting = task.config.fitting
    run_dir = task.config.run.folder
    # The workers may have used a GPU that this process does not have. In this case, the
    # CPU is used.
    cuda = torch.cuda.is_available()
    device = resolve_device(task.config.run.device if cuda else "cpu")
    bundle, source = open_start(task, ALONE, device)
    state = last_checkpoint(run_dir, task.run)
    if state is None or not any(name.startswith("joint.") for name in state.weights):
        raise ModelError(
            f"{run_dir} has no checkpoint of the joint phase yet; resume the"
            " training run"
        )
    adapter = trained_part(bundle.adapter)
    for prefix, module in (("adapter.", adapter), ("joint.", bundle.joint)):
        named = {
            name.removeprefix(prefix): part
            for name, part in state.weights.items()
            if name.startswith(prefix)
        }
        module.load_state_dict(named)
    bundle = replace(bundle, trained=True, info=None)
    bundle.adapter.to(device).eval()
    bundle.joint.to(device).eval()
    # The offset block is estimated from evenly spaced training images.
    rows = task.items.rows[:: max(1, source.data.images // _OFFSET_IMAGES)]
    blocks = (
        tokens.view(torch.int16).numpy().view(BF16)
        for tokens in source.data.features.iter_tokens(adapter, rows, device)
    )
    bundle = replace(bundle, offset=estimate_offset(blocks))
    init = task.config.inputs.init
    if fitting.pooled_dim:
        pooled = fit_pooled_similarity(
            adapter, bundle.joint, source, fitting.pooled_dim, on_progress
        )
        bundle = replace(bundle, pooled=pooled.to(device).eval())
    elif init is not None and task.dev is not None:
        initial = ModelBundle.load(init, device=str(device))
        # Only a pooled similarity for tokens of the same width fits the trained bundle.
        if initial.joint.width == bundle.joint.width:
            bundle = replace(bundle, pooled=initial.pooled)
    score = DirectionWeights()
    logit_range = None
    choices = dict[str, WeightChoice]()
    if task.dev is not None:
        dev = TrainingData(task.dev)
        pools = dev_pools(bundle, dev, fitting, on_progress=on_progress)
        choices = {name: choose_weights(pools[name]) for name in DIRECTIONS}
        score = DirectionWeights(
            **{direction: choice.weights for direction, choice in choices.items()}
        )
        logit_range = choices[TEXT_TO_IMAGE].logit_range
    return (
        replace(bundle, score=score, logit_range=logit_range),
        state.step,
        choices,
    )
