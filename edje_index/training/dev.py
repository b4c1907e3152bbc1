"""Scores pools of dev captions and dev images with a bundle. A training run measures
the recall of its model on these pools, and fits the weights of the final score to them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.evaluation.pools import score_pairs, split_set
from edje_index.progress import OnProgress
from edje_index.scoring.weights import (
    DIRECTIONS,
    EMBEDDING,
    JOINT_PARTS,
)
from edje_index.training.config import FittingConfig
from edje_index.training.dataset import CaptionedRows, StoredFeatures, TrainingData
from edje_index.training.fit_weights import (
    DevPools,
)
from edje_index.training.start import trained_part
from storage_formats.reading.embeddings import read_embeddings

_ADAPTER_BATCH = 32


@torch.inference_mode()
def dev_pools(
    bundle: ModelBundle,
    dev: tuple[CaptionedRows, Path],
    config: FittingConfig,
    names: tuple[str, ...] = JOINT_PARTS,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> dict[str, DevPools]:
    """Score the candidates whose embeddings are most similar to each dev query. Return
    the pools of each direction.

    The modules of `bundle` must be in evaluation mode.

    Args:
        dev: the dev images, and the file of their `TrainingData`.
        names: parts of the final score to compute. Parts that `bundle` lacks are left
            out. The embedding similarity is always part of the result.
        on_progress: called with the name of the activity, the number of scored pairs,
            and the number of all pairs. An exception raised by `on_progress` stops this
            function.
    """
    items, path = dev
    queries = split_set(items.captions(0, len(items.rows)), items.rows)
    queries = queries.subsampled(config.dev_captions, seed=0)
    embeddings = (
        read_embeddings(items.index, queries.rows),
        TrainingData.open(path, items).records["embedding"],
    )
    nearest = {
        direction: queries.pools(direction, *embeddings, config.dev_pool)
        for direction in DIRECTIONS
    }
    pairs = [queries.pairs(direction, pools) for direction, pools in nearest.items()]
    # Most images are in several pools. The features of each image are read once.
    image_rows = np.unique(np.concatenate([rows.ravel() for _, rows in pairs]))
    features = StoredFeatures(items.index)
    adapter = trained_part(bundle.adapter)
    blocks = []
    for first in range(0, len(image_rows), _ADAPTER_BATCH):
        values = features.fetch(image_rows[first : first + _ADAPTER_BATCH])
        # The tokens are rounded to bfloat16, as in an index.
        blocks.append(adapter(values.to(bundle.joint.device).float()).bfloat16().cpu())
    tokens = torch.cat(blocks)
    scorer = bundle.scorer
    parts = score_pairs(
        scorer,
        [name for name in names if name in scorer.part_names],
        queries.captions,
        pairs,
        lambda rows: tokens[torch.from_numpy(np.searchsorted(image_rows, rows))],
        on_progress,
        "pairs of dev captions and images scored",
    )
    return {
        direction: DevPools(
            parts={EMBEDDING: pools.similarities, **values},
            right=pools.relevant,
            images=queries.images_of_queries(direction),
        )
        for (direction, pools), values in zip(nearest.items(), parts, strict=True)
    }
