"""Makes a bundle from a checkpoint of a training run, and fits the final score of
the bundle.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.progress import OnProgress
from edje_index.scoring.parts import HubnessBank, ScoreModels
from edje_index.scoring.weights import TEXT_TO_IMAGE, DirectionWeights
from edje_index.training.batches import BatchSource
from edje_index.training.checkpoints import Checkpoints
from edje_index.training.dev import DevSet, choose_dev_weights
from edje_index.training.features import nothing_readable
from edje_index.training.fit_weights import WeightChoice
from edje_index.training.loop import TrainTask, open_start
from edje_index.training.pooled_similarity import fit_pooled_similarity
from edje_index.training.random_streams import BANK, stream
from edje_index.training.start import trained_part
from edje_index.training.workers import WorkerGroup

_BATCH = 64
_ACTIVITY = "making the hubness bank, captions and images"


def finish_model(
    task: TrainTask, step: int | None, on_progress: OnProgress
) -> tuple[ModelBundle, int, dict[str, WeightChoice]]:
    """Make a bundle from a checkpoint. Its final score follows the settings in
    ``task.config.fitting``.

    The weights are fitted to the dev captions. Without dev captions, the final score is
    the logit alone. A hubness bank is left out if the hubness correction has weight 0
    in both directions.

    Args:
        step: step of the checkpoint; None means the last checkpoint.
        on_progress: called with the progress. An exception raised by `on_progress`
            stops this function.

    Returns:
        The trained bundle, not saved yet; the number of finished steps of the joint
        phase; and the weights and recall by direction, empty if no weights were fitted.
    """
    fitting = task.config.fitting
    run_dir = task.config.run.folder
    bundle, source, device = open_start(task, WorkerGroup())
    checkpoints = Checkpoints(run_dir, task.run)
    state = checkpoints.latest() if step is None else checkpoints.at(step)
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
    if fitting.pooled_dim:
        pooled = fit_pooled_similarity(
            adapter, bundle.joint, source, fitting.pooled_dim, on_progress
        )
        bundle = replace(bundle, pooled=pooled.to(device).eval())
    if fitting.hubness_bank:
        bank = make_hubness_bank(
            adapter, bundle.score_models, source, fitting.hubness_bank, on_progress
        )
        bundle = replace(bundle, hubness_bank=bank.to(device).eval())
    score = DirectionWeights()
    logit_range = None
    choices = dict[str, WeightChoice]()
    if task.dev is not None:
        dev = DevSet.open(*task.dev, source.features)
        choices = choose_dev_weights(bundle, dev, source.features, fitting, on_progress)
        score = DirectionWeights(
            **{direction: choice.weights for direction, choice in choices.items()}
        )
        logit_range = choices[TEXT_TO_IMAGE].logit_range
    has_bank = bundle.hubness_bank is not None and (
        score.t2i.hubness or score.i2t.hubness
    )
    used_bank = bundle.hubness_bank if has_bank else None
    return (
        replace(bundle, score=score, hubness_bank=used_bank, logit_range=logit_range),
        state.step,
        choices,
    )


@torch.inference_mode()
def make_hubness_bank(
    adapter: nn.Module,
    models: ScoreModels,
    source: BatchSource,
    count: int,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> HubnessBank:
    """Make a hubness bank of at most `count` random captions and `count` random images
    of the training data.

    Images that cannot be read are left out. The bank is on the CPU.

    Args:
        adapter: the trained adapter, which maps features [b, n, d_v] to tokens [b, m,
            d].
        models: computes the pooled vectors. If the bundle has no pooled similarity, the
            vectors have width 0.
        count: maximum number of captions in the bank, and maximum number of images in
            the bank.
        on_progress: called with the number of captions and images that are finished.
    """
    data = source.data
    rng = stream(source.config.loop.seed, BANK)
    captions = np.sort(rng.permutation(len(data.text_embeddings))[:count])
    images = np.sort(rng.permutation(data.images)[:count])
    joint = models.joint
    pooled = models.pooled
    total = len(captions) + len(images)
    caption_vectors = torch.zeros(len(captions), 0)
    image_vectors = torch.zeros(len(images), 0)
    if pooled is not None:
        chunks = []
        for start in range(0, len(captions), _BATCH):
            on_progress(_ACTIVITY, start, total)
            batch = captions[start : start + _BATCH]
            token_ids = [
                joint.tokenizer.truncated(data.caption(caption)) for caption in batch
            ]
            sentences = joint.sentence_vectors(
                joint.tokenizer.inputs_of_ids(token_ids, 0)
            )
            chunks.append(pooled.captions(token_ids, sentences).cpu())
        caption_vectors = torch.cat(chunks)
        chunks = []
        readable = []
        for start in range(0, len(images), _BATCH):
            on_progress(_ACTIVITY, len(captions) + start, total)
            batch = images[start : start + _BATCH]
            features, are_readable = source.features.fetch(data.rows[batch])
            readable.append(batch[are_readable])
            if are_readable.any():
                tokens = adapter(
                    features[torch.from_numpy(are_readable)].to(joint.device).float()
                )
                # bfloat16, as an index stores tokens
                chunks.append(models.image_vectors(tokens.bfloat16()).cpu())
        if not chunks:
            raise nothing_readable()
        image_vectors = torch.cat(chunks)
        images = np.concatenate(readable)
    return HubnessBank.of(
        (torch.from_numpy(data.text_embeddings[captions]), caption_vectors),
        (source.features.embeddings(data.rows[images]), image_vectors),
    )
